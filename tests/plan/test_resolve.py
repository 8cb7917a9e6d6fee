"""Plan + model -> effective plan: autos, ranks, nodes, digest."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.plan.resolve import resolve
from tests.plan.plans import SPLIT, UNIFIED, effective, load
from tests.spec.model_specs import DEEPSEEK_V3, SMALL_DEEPSEEK, SMALL_QWEN

ROOT = Path(__file__).parents[2]


def values(thing: object) -> list[object]:
    if is_dataclass(thing):
        return [v for f in fields(thing) for v in values(getattr(thing, f.name))]
    if isinstance(thing, tuple):
        return [v for item in thing for v in values(item)]
    return [thing]


@pytest.mark.parametrize("text", [SPLIT, UNIFIED])
@pytest.mark.parametrize("model", [SMALL_DEEPSEEK, SMALL_QWEN], ids=["deepseek", "qwen"])
def test_no_auto_is_left(tmp_path: Path, text, model):
    plan = effective(tmp_path, text, model=model)
    assert "auto" not in values(plan)
    assert '"auto"' not in json.dumps(plan.to_json())


def test_autos_of_the_split_plan(tmp_path: Path):
    plan = effective(tmp_path, SPLIT)
    for d in plan.deployments:
        assert d.scheduler.pipeline_depth == 0
        assert (d.dispatch.backend, d.dispatch.dtype, d.dispatch.max_tokens) == ("shm", "float32", 512)
        assert (d.kv_cache.dtype, d.overlap.micro_batches) == ("float32", "per_step")
    assert ("deployments.decode.dispatch.max_tokens", "max_batch_tokens") in plan.derived
    assert "model.dtype" not in dict(plan.derived)


def test_auto_follows_the_plan_and_the_checkpoint(tmp_path: Path):
    at = "deployments.unified"
    plan = effective(tmp_path, UNIFIED, f"{at}.scheduler.max_batch_tokens=300", model=SMALL_QWEN)
    unified = plan.deployment("unified")
    assert unified.dispatch.backend == "local"
    assert (plan.model.dtype, unified.kv_cache.dtype, unified.dispatch.dtype) == ("bfloat16",) * 3
    assert unified.dispatch.max_tokens == 300
    assert plan.cluster.ranks_per_node == 1
    assert set(dict(plan.derived)) == {
        "model.dtype", "cluster.ranks_per_node", f"{at}.scheduler.pipeline_depth", f"{at}.kv_cache.dtype",
        f"{at}.dispatch.backend", f"{at}.dispatch.dtype", f"{at}.dispatch.max_tokens",
        f"{at}.dispatch.mode", f"{at}.overlap.micro_batches", f"{at}.kernels.experts",
        f"{at}.kernels.mla_decode",
    }  # fmt: skip


def test_given_values_stay(tmp_path: Path):
    at = "deployments.unified"
    plan = effective(
        tmp_path, UNIFIED, f"{at}.scheduler.pipeline_depth=1", f"{at}.dispatch.backend=torch",
        f"{at}.dispatch.max_tokens=64", f"{at}.overlap.micro_batches=1", f"{at}.kv_cache.dtype=float32",
        f"{at}.dispatch.dtype=float32", "model.dtype=float32", "cluster.ranks_per_node=1",
        f"{at}.dispatch.mode=per_step", f"{at}.kernels.experts=reference",
        f"{at}.kernels.mla_decode=reference",
    )  # fmt: skip
    unified = plan.deployment("unified")
    assert unified.scheduler.pipeline_depth == 1
    assert unified.dispatch.modes == ("normal", "low_latency")
    assert (unified.dispatch.backend, unified.dispatch.max_tokens) == ("torch", 64)
    assert plan.derived == ()


def test_a_device_gets_pipeline_depth_1(tmp_path: Path):
    plan = load(tmp_path, UNIFIED).plan
    cluster = plan.cluster.model_copy(update={"device": "cuda"})
    moved = resolve(plan.model_copy(update={"cluster": cluster}), SMALL_DEEPSEEK)
    assert moved.deployment("unified").scheduler.pipeline_depth == 1


def test_an_instance_over_several_nodes_does_not_share_memory(tmp_path: Path):
    plan = effective(tmp_path, SPLIT, "cluster.nodes=2", "cluster.ranks_per_node=3")
    assert [d.dispatch.backend for d in plan.deployments] == ["shm", "torch"]
    assert [plan.nodes_of_an_instance(d.name) for d in plan.deployments] == [1, 2]


def test_ranks_in_yaml_order(tmp_path: Path):
    sets = ("deployments.decode.instances=2", "deployments.prefill.instances=3", "cluster.ranks_per_node=14")
    plan = effective(tmp_path, SPLIT, *sets)
    assert [(i.name, i.deployment, list(i.ranks)) for i in plan.instances] == [
        ("prefill-0", "prefill", [0, 1]),
        ("prefill-1", "prefill", [2, 3]),
        ("prefill-2", "prefill", [4, 5]),
        ("decode-0", "decode", [6, 7, 8, 9]),
        ("decode-1", "decode", [10, 11, 12, 13]),
    ]
    assert plan.num_ranks == 14
    assert [plan.instance_of(r).name for r in (0, 5, 6, 13)] == [
        "prefill-0",
        "prefill-2",
        "decode-0",
        "decode-1",
    ]
    with pytest.raises(IndexError):
        plan.instance_of(14)


def test_decode_first(tmp_path: Path):
    head, _, rest = SPLIT.partition("  prefill:\n")
    prefill, _, decode = rest.partition("  decode:\n")
    plan = effective(tmp_path, head + "  decode:\n" + decode + "  prefill:\n" + prefill)
    assert [(i.name, i.ranks) for i in plan.instances] == [("decode-0", range(4)), ("prefill-0", range(4, 6))]


@pytest.mark.parametrize(
    ("nodes", "per_node", "prefill", "decode"),
    [(1, 6, 2 / 6, 4 / 6), (2, 3, 2 / 3, 4 / 3), (3, 2, 1, 2), (6, 1, 2, 4)],
)
def test_nodes_of_a_role_may_be_fractional(tmp_path: Path, nodes, per_node, prefill, decode):
    plan = effective(tmp_path, SPLIT, f"cluster.nodes={nodes}", f"cluster.ranks_per_node={per_node}")
    assert plan.deployment("prefill").nodes == pytest.approx(prefill)
    assert plan.deployment("decode").nodes == pytest.approx(decode)
    assert sum(d.nodes for d in plan.deployments) == pytest.approx(nodes)
    assert plan.node_of(5) == nodes - 1


@pytest.mark.parametrize(("redundant", "slots", "surplus"), [(0, 8, 0), (8, 10, 0), (1, 9, 3), (6, 10, 2)])
def test_slots(tmp_path: Path, redundant, slots, surplus):
    decode = effective(tmp_path, SPLIT, f"deployments.decode.redundant_experts={redundant}").deployment(
        "decode"
    )
    assert (decode.slots_per_rank, decode.num_slots, decode.surplus_slots) == (slots, 4 * slots, surplus)


def test_published_decode_unit(tmp_path: Path):
    """EP144 with 32 redundant experts: two routed experts on every GPU."""
    sets = (
        "deployments.unified.expert_parallel=144",
        "deployments.unified.redundant_experts=32",
        "cluster.nodes=18",
    )
    plan = effective(tmp_path, UNIFIED, *sets, model=DEEPSEEK_V3)
    unified = plan.deployment("unified")
    assert (unified.slots_per_rank, unified.surplus_slots, unified.nodes) == (2, 0, 18)


def test_kv_is_the_models(tmp_path: Path):
    kv = effective(tmp_path, SPLIT).deployment("decode").kv
    assert kv.token_bytes == 8 * (512 + 64) * 4
    assert kv.primary.block_tokens == 16


def test_digest_is_of_the_values_not_of_their_origin(tmp_path: Path):
    base = effective(tmp_path, SPLIT)
    assert len(base.digest) == 16
    assert int(base.digest, 16) >= 0
    same = (
        "deployments.decode.dispatch.max_tokens=512",
        "cluster.ranks_per_node=auto",
        "model.path=/elsewhere",
    )
    assert effective(tmp_path, SPLIT, *same).digest == base.digest
    others = [
        effective(tmp_path, SPLIT, "deployments.decode.redundant_experts=4"),
        effective(tmp_path, SPLIT, "deployments.decode.scheduler.pipeline_depth=1"),
        effective(tmp_path, SPLIT, "slo.ttft_ms=1999"),
        effective(tmp_path, SPLIT, "cluster.nodes=2", "cluster.ranks_per_node=3"),
        effective(tmp_path, SPLIT, model=replace(SMALL_DEEPSEEK, norm_eps=1e-5)),
    ]
    assert len({base.digest, *(o.digest for o in others)}) == 1 + len(others)


def test_digest_is_the_same_in_every_process(tmp_path: Path):
    here = effective(tmp_path, SPLIT).digest
    code = (
        "from pathlib import Path; import sys\n"
        "from tests.plan.plans import SPLIT, effective\n"
        "print(effective(Path(sys.argv[1]), SPLIT).digest)"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True, text=True, check=True, timeout=60, cwd=ROOT, env=environment,
        )  # fmt: skip
        assert done.stdout.strip() == here


def test_effective_plans_cross_processes_and_become_json(tmp_path: Path):
    plan = effective(tmp_path, SPLIT)
    copy: EffectivePlan = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    data = json.loads(json.dumps(plan.to_json()))
    assert data["digest"] == plan.digest
    assert data["deployments"]["decode"]["dispatch"] == {
        "backend": "shm",
        "dtype": "float32",
        "max_tokens": 512,
        "mode": "normal",
    }
    assert data["instances"][1] == {"name": "decode-0", "deployment": "decode", "ranks": [2, 3, 4, 5]}
    assert list(data["deployments"]) == ["prefill", "decode"]
