"""What needs the model or the machine: memory, its key and its number; limits that only warn."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.errors import PlanError
from moe_runtime.plan.budget import MemoryBudget, memory_per_rank
from moe_runtime.plan.resolve import resolve
from moe_runtime.plan.unavailable import RULES
from moe_runtime.plan.validate import plan_warnings, validate
from moe_runtime.spec.bytes import parameter_counts
from tests.plan.plans import GIB, SPLIT, UNIFIED, checked, effective, load
from tests.spec.model_specs import DEEPSEEK_V3, SMALL_DEEPSEEK, SMALL_QWEN

MIB = 2**20


def test_budget_of_the_split_plan(tmp_path: Path):
    _, _, (prefill, decode) = checked(tmp_path, SPLIT)
    counts = parameter_counts(SMALL_DEEPSEEK)
    for budget in (prefill, decode):
        assert budget.shared_weights == 4 * (counts.replicated + counts.replicated_fp32)
        assert budget.kv_cache == 512 * 16 * 8 * 576 * 4
        assert budget.staging == 0
        assert any("staging" in note for note in budget.notes)
    assert (prefill.experts, prefill.redundant_experts) == (16 * 7 * counts.expert * 4, 0)
    assert (decode.experts, decode.redundant_experts) == (
        8 * 7 * counts.expert * 4,
        2 * 7 * counts.expert * 4,
    )
    assert decode.total == sum(size for _, size in decode.terms)
    assert len(decode.terms) == 7


def test_staging_holds_a_layers_slots_where_experts_move(tmp_path: Path):
    _, _, (prefill, decode) = checked(tmp_path, SPLIT, "deployments.decode.balancing.enabled=true")
    assert prefill.staging == 0
    assert decode.staging == 10 * parameter_counts(SMALL_DEEPSEEK).expert * 4


def test_weights_of_all_ranks_are_the_model(tmp_path: Path):
    """Experts of all ranks together are the model's; only the shared weights are replicated."""
    counts = parameter_counts(SMALL_DEEPSEEK)
    for ranks in (1, 2, 4, 8):
        _, _, (budget,) = checked(
            tmp_path, UNIFIED, f"deployments.unified.expert_parallel={ranks}", host_memory_bytes=64 * GIB
        )
        total = budget.shared_weights + ranks * budget.experts
        assert total == 4 * counts.total
        assert budget.redundant_experts == 0


def test_shared_experts_in_slots_are_counted_there(tmp_path: Path):
    sets = ("deployments.unified.expert_parallel=4", "deployments.unified.redundant_experts=3")
    _, _, (plain,) = checked(tmp_path, UNIFIED, *sets)
    _, plan, (slots,) = checked(tmp_path, UNIFIED, *sets, "deployments.unified.shared_experts=slots")
    unified = plan.deployment("unified")
    assert (unified.num_slots, unified.slots_per_rank, unified.surplus_slots) == (36, 9, 0)
    expert = 7 * parameter_counts(SMALL_DEEPSEEK).expert * 4
    assert plain.shared_weights - slots.shared_weights == expert
    # 33 experts take 9 slots of a rank, which the 3 redundant ones fill.
    assert (slots.experts, slots.redundant_experts) == (9 * expert, 0)
    # A row more per token and rank comes back, an expert more per token is received.
    assert slots.dispatch > plain.dispatch


@pytest.mark.parametrize("backend", ["shm", "torch"])
def test_low_latency_mode_takes_memory_for_static_shapes(tmp_path: Path, backend: str):
    sets = ("deployments.unified.expert_parallel=4", f"deployments.unified.dispatch.backend={backend}")
    _, _, (normal,) = checked(tmp_path, UNIFIED, *sets)
    _, _, (both,) = checked(tmp_path, UNIFIED, *sets, "deployments.unified.dispatch.mode=per_step")
    assert both.dispatch - normal.dispatch == 8 * (4 * 512) * 2 * (512 * 4)


def test_uneven_ranks_count_their_surplus_slot(tmp_path: Path):
    _, plan, (budget,) = checked(tmp_path, UNIFIED, "deployments.unified.expert_parallel=3")
    assert plan.deployment("unified").surplus_slots == 1
    assert budget.experts == 11 * 7 * parameter_counts(SMALL_DEEPSEEK).expert * 4


def test_budget_of_deepseek_v3_decode(tmp_path: Path):
    """A published decode unit in bfloat16: weights per GPU from the published sizes."""
    sets = (
        "deployments.unified.expert_parallel=144", "deployments.unified.redundant_experts=32",
        "cluster.nodes=18", "deployments.unified.kv_cache.block_tokens=64",
        "deployments.unified.kv_cache.blocks=8192",
    )  # fmt: skip
    plan = effective(tmp_path, UNIFIED, *sets, model=DEEPSEEK_V3)
    budget = memory_per_rank(plan, plan.deployment("unified"), DEEPSEEK_V3)
    assert budget.experts + budget.redundant_experts == 2 * 58 * 3 * 7168 * 2048 * 2
    assert budget.kv_cache == 8192 * 64 * 61 * 576 * 2
    assert budget.shared_weights == pytest.approx(34.2e9, rel=0.01)


def refused(tmp_path: Path, *sets: str, text: str = SPLIT, memory: int | None) -> PlanError:
    with pytest.raises(PlanError) as caught:
        checked(tmp_path, text, *sets, host_memory_bytes=memory)
    return caught.value


@pytest.mark.parametrize(
    ("sets", "memory", "key"),
    [
        (("deployments.decode.kv_cache.blocks=20000",), 8 * GIB, "deployments.decode.kv_cache.blocks"),
        (("deployments.prefill.kv_cache.blocks=20000",), 8 * GIB, "deployments.prefill.kv_cache.blocks"),
        (
            ("deployments.decode.scheduler.max_batch_tokens=20000",),
            6 * GIB,
            "deployments.decode.dispatch.max_tokens",
        ),
    ],
)
def test_a_plan_beyond_the_memory_names_a_number_that_fits(tmp_path: Path, sets, memory, key):
    error = refused(tmp_path, *sets, memory=memory)
    assert error.key == key
    assert "all 6 ranks together" in str(error)
    found = re.search(r"(\d+) fits$", error.hint)
    assert found, error.hint
    fits = int(found[1])
    assert 0 < fits < error.value  # type: ignore[operator]
    checked(tmp_path, SPLIT, *sets, f"{key}={fits}", host_memory_bytes=memory)
    # and no much larger one does
    with pytest.raises(PlanError):
        checked(tmp_path, SPLIT, *sets, f"{key}={fits + fits // 50 + 1}", host_memory_bytes=memory)


def test_redundant_experts_beyond_the_memory(tmp_path: Path):
    sets = ("deployments.decode.redundant_experts=90", "deployments.decode.kv_cache.blocks=16",
            "deployments.prefill.kv_cache.blocks=16")  # fmt: skip
    error = refused(tmp_path, *sets, memory=5 * GIB // 2)
    assert (error.key, error.value, error.hint) == (
        "deployments.decode.redundant_experts",
        90,
        "redundant_experts: 0 fits",
    )
    checked(tmp_path, SPLIT, *sets, "deployments.decode.redundant_experts=0", host_memory_bytes=5 * GIB // 2)


def test_a_model_that_cannot_fit_names_the_memory_it_needs(tmp_path: Path):
    sets = tuple(f"deployments.{d}.kv_cache.blocks=16" for d in ("prefill", "decode"))
    error = refused(tmp_path, *sets, memory=300 * MIB)
    assert error.key == "model.path"
    needed = re.search(r"it fits in ([\d.]+) MiB", error.hint)
    assert needed
    checked(tmp_path, SPLIT, *sets, host_memory_bytes=int(float(needed[1]) * MIB))


def test_nominal_memory_stands_in_for_an_unknown_host(tmp_path: Path):
    sets = ("deployments.decode.kv_cache.blocks=20000",)
    assert "of 16.00 GiB" in str(refused(tmp_path, *sets, memory=None))
    checked(tmp_path, SPLIT, *sets, host_memory_bytes=64 * GIB)


def test_grouping_into_nodes_does_not_multiply_the_memory(tmp_path: Path):
    sets = ("deployments.decode.kv_cache.blocks=20000",)
    grouped = ("cluster.nodes=6", "cluster.ranks_per_node=1")
    assert "24." in str(refused(tmp_path, *sets, *grouped, memory=8 * GIB))


def test_a_device_holds_its_own_rank(tmp_path: Path):
    """Not reachable from YAML before GPUs are; searches for plans make such plans."""
    plan = effective(tmp_path, UNIFIED, "deployments.unified.expert_parallel=32", model=DEEPSEEK_V3)

    def on(hardware: str) -> tuple[MemoryBudget, ...]:
        cluster = replace(plan.cluster, hardware=hardware)
        return validate(None, replace(plan, cluster=cluster), DEEPSEEK_V3)

    assert on("h200-sxm")[0].total < 141e9
    with pytest.raises(PlanError, match=r"each rank takes .* of 74.51 GiB") as caught:
        on("h800")
    assert "--set" not in str(caught.value)


def test_warnings_name_what_is_untested(tmp_path: Path):
    assert plan_warnings(effective(tmp_path, SPLIT), SMALL_DEEPSEEK) == ()
    for backend in ("shm", "torch"):
        sets = ("deployments.unified.expert_parallel=16", f"deployments.unified.dispatch.backend={backend}")
        (warning,) = plan_warnings(effective(tmp_path, UNIFIED, *sets), SMALL_DEEPSEEK)
        assert f"deployments.unified: backend {backend}, untested: ranks = 16 must be at most 8" in warning


def test_rows_in_fp8_need_whole_blocks(tmp_path: Path):
    sets = ("deployments.unified.expert_parallel=2", "deployments.unified.dispatch.dtype=float8_e4m3")
    _, _, (in_fp8,) = checked(tmp_path, UNIFIED, *sets)
    _, _, (in_fp32,) = checked(tmp_path, UNIFIED, sets[0])
    assert in_fp8.dispatch < in_fp32.dispatch
    with pytest.raises(PlanError, match="a multiple of 128.*hidden = 576") as caught:
        checked(tmp_path, UNIFIED, *sets, model=replace(SMALL_DEEPSEEK, hidden=576))
    assert (caught.value.key, caught.value.value) == ("deployments.unified.dispatch.dtype", "float8_e4m3")


def test_largest_redundancy_and_degree_are_accepted(tmp_path: Path):
    sets = ("deployments.unified.expert_parallel=4", "deployments.unified.redundant_experts=96")
    _, plan, _ = checked(tmp_path, UNIFIED, *sets)
    assert plan.deployment("unified").slots_per_rank == 32
    checked(tmp_path, UNIFIED, "deployments.unified.expert_parallel=32")


def test_bfloat16_runs_on_cpu(tmp_path: Path):
    _, plan, (budget,) = checked(tmp_path, UNIFIED, model=SMALL_QWEN)
    assert plan.model.dtype == "bfloat16"
    assert budget.kv_cache == 512 * 16 * 8 * 256 * 2


def test_every_unavailable_rule_allows_the_default(tmp_path: Path):
    """A row whose working values miss the default would refuse every plan."""
    plan = load(tmp_path, SPLIT).plan
    validate(None, resolve(plan, SMALL_DEEPSEEK), SMALL_DEEPSEEK)
    assert len({rule.key for rule in RULES}) == len(RULES)
