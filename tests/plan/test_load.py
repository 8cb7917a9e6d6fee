"""Reading plans: defaults, overrides, provenance, broken files."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.errors import PlanError
from moe_runtime.plan.load import load_plan
from tests.plan.plans import SPLIT, UNIFIED, load, write

CHUNK = "deployments.decode.scheduler.chunk_tokens"


def test_three_lines_are_a_plan(tmp_path: Path):
    plan = load(tmp_path, UNIFIED).plan
    unified = plan.deployments["unified"]
    assert (unified.instances, unified.expert_parallel, unified.redundant_experts) == (1, 1, 0)
    assert (unified.scheduler.max_batch_tokens, unified.scheduler.max_sequences) == (512, 32)
    assert (unified.scheduler.chunk_tokens, unified.scheduler.pipeline_depth) == (256, "auto")
    assert (unified.kv_cache.block_tokens, unified.kv_cache.blocks) == (16, 512)
    assert (plan.server.host, plan.server.port) == ("127.0.0.1", 8000)
    assert (plan.slo.ttft_ms, plan.slo.tpot_ms) == (2000, 100)


@pytest.mark.parametrize(
    ("in_file", "overrides", "value", "origin"),
    [
        (False, (), 256, "default"),
        (True, (), 64, "file line 8"),
        (True, (f"{CHUNK}=32",), 32, "command line"),
        (False, (f"{CHUNK}=32",), 32, "command line"),
        (True, (f"{CHUNK}=32", f"{CHUNK}=16"), 16, "command line"),
        (True, (f"{CHUNK}=32", "deployments.decode.scheduler={max_sequences: 4}"), 256, "default"),
        (True, ("deployments.decode.scheduler={chunk_tokens: 8}",), 8, "command line"),
    ],
)
def test_command_line_beats_file_beats_default(tmp_path, in_file, overrides, value, origin):
    text = (
        SPLIT.replace("    redundant", "    scheduler: {chunk_tokens: 64}\n    redundant")
        if in_file
        else SPLIT
    )
    loaded = load(tmp_path, text, *overrides)
    assert loaded.plan.deployments["decode"].scheduler.chunk_tokens == value
    assert str(loaded.origins[CHUNK]) == origin


def test_every_value_has_an_origin(tmp_path: Path):
    loaded = load(tmp_path, SPLIT, "server.port=9000")

    def leaves(value: object, prefix: str) -> list[str]:
        if not isinstance(value, dict):
            return [prefix]
        return [leaf for k, v in value.items() for leaf in leaves(v, f"{prefix}.{k}" if prefix else k)]

    assert set(loaded.origins) == set(leaves(loaded.plan.model_dump(), ""))
    told = {key: str(origin) for key, origin in loaded.origins.items() if origin.kind != "default"}
    assert told == {
        "model.path": "file line 1",
        "model.dtype": "file line 1",
        "cluster.nodes": "file line 2",
        "cluster.ranks_per_node": "file line 2",
        "deployments.prefill.expert_parallel": "file line 5",
        "deployments.decode.expert_parallel": "file line 7",
        "deployments.decode.redundant_experts": "file line 8",
        "server.port": "command line",
    }


def test_an_override_may_add_what_the_file_leaves_out(tmp_path: Path):
    loaded = load(tmp_path, UNIFIED, "deployments.unified.scheduler.pipeline_depth=1", "slo.tpot_ms=20")
    assert loaded.plan.deployments["unified"].scheduler.pipeline_depth == 1
    assert loaded.plan.slo.tpot_ms == 20


def test_deployments_keep_their_order(tmp_path: Path):
    head, prefill, decode = (
        SPLIT.partition("  prefill:")[0],
        "  prefill: {expert_parallel: 2}\n",
        "  decode: {expert_parallel: 4}\n",
    )
    assert list(load(tmp_path, head + prefill + decode).plan.deployments) == ["prefill", "decode"]
    assert list(load(tmp_path, head + decode + prefill).plan.deployments) == ["decode", "prefill"]


def test_relative_model_path_starts_at_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    write(folder, UNIFIED)
    monkeypatch.chdir(tmp_path)
    for path in (folder / "plan.yaml", Path("configs/plan.yaml")):
        assert load_plan(path).plan.model.path == str(folder / "checkpoint")
        assert load_plan(path, ["model.path=../models/x"]).plan.model.path == str(tmp_path / "models" / "x")
        assert load_plan(path, ["model.path=/models/x"]).plan.model.path == "/models/x"


def test_plans_are_frozen_and_cross_processes(tmp_path: Path):
    loaded = load(tmp_path, SPLIT)
    with pytest.raises(ValueError, match="frozen"):
        loaded.plan.server.port = 1
    assert pickle.loads(pickle.dumps(loaded)) == loaded


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("plan.yaml: is empty", "model, cluster, deployments")),
        (b"# only a comment\n", ("is empty",)),
        (b"- a\n- b\n", ("is not a mapping",)),
        (b"model: {path: x\ndeployments: 3\n", ("plan.yaml:2:12: is not valid YAML",)),
        (b"model:\n\tpath: x\n", ("plan.yaml:2:1: is not valid YAML",)),
        (b"model: x\nbad: \x07\n", ("plan.yaml:2:6", "control character")),
        (b"model: \xff\xfe\n", ("plan.yaml:1", "not UTF-8")),
        (b"a: 1\n---\nb: 2\n", ("plan.yaml:2:1", "single document")),
        (b"model: !!python/object:os.system {}\n", ("plan.yaml:1:8", "is not allowed")),
        (b"model: !!timestamp 2020-01-01\n", ("plan.yaml:1:8", "is not allowed")),
        (b"server: {port: !!int eighty}\n", ("plan.yaml:1:16", "is not an integer")),
        (b"model: &m {path: *m}\n", ("more than 16 levels", "anchors")),
        (b"[" * 5000, ("is not valid YAML",)),
        (b"a" * (1 << 20) + b": 1\n", ("a plan has at most",)),
    ],
    ids=lambda p: repr(p)[:24] if isinstance(p, bytes) else None,
)
def test_broken_files(tmp_path: Path, content: bytes, words: tuple[str, ...]):
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    for word in words:
        assert word in str(caught.value)


def test_alias_bombs_are_refused(tmp_path: Path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(PlanError, match="more than 10000 values"):
        load(tmp_path, "\n".join(lines))


def test_aliases_share_a_section(tmp_path: Path):
    text = SPLIT.replace(
        "expert_parallel: 2", "expert_parallel: 2\n    scheduler: &s {chunk_tokens: 64}"
    ).replace("expert_parallel: 4", "expert_parallel: 4\n    scheduler: *s")
    assert load(tmp_path, text).plan.deployments["decode"].scheduler.chunk_tokens == 64


@pytest.mark.parametrize("path", ["absent.yaml", ".", "a\0b"])
def test_unreadable_paths(tmp_path: Path, path: str):
    with pytest.raises(PlanError):
        load_plan(tmp_path / path)


@pytest.mark.parametrize(
    "override", ["server.port=[", "server.port='", "=3", "a..b=3", "server.=1", "server.host=!!x y"]
)
def test_broken_overrides(tmp_path: Path, override: str):
    with pytest.raises(PlanError, match="--set"):
        load(tmp_path, UNIFIED, override)


def test_importing_the_plan_is_light():
    """Neither torch nor numpy, and nothing of the runtime but spec and errors."""
    code = (
        "import sys, moe_runtime.plan.show, moe_runtime.plan.validate\n"
        "print(sorted(m for m in sys.modules if m in ('torch', 'numpy', 'transformers')"
        " or m.startswith('moe_runtime.') and m.split('.')[1] not in ('plan', 'spec', 'errors')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
