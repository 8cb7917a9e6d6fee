"""Plans that cannot work: each message names the key, the value, and something that would work."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moe_runtime.errors import PlanError
from moe_runtime.plan.unavailable import unavailable_to_run
from moe_runtime.spec.model import ModelSpec
from tests.plan.plans import SPLIT, UNIFIED, checked
from tests.spec.model_specs import SMALL_DEEPSEEK, SMALL_QWEN


@dataclass(frozen=True)
class Bad:
    """`old` in the plan becomes `new` (or overrides are given); the message must hold all `words`."""

    name: str
    key: str
    words: tuple[str, ...]
    hint: str
    old: str = ""
    new: str = ""
    text: str = SPLIT
    sets: tuple[str, ...] = ()
    value: object = None
    model: ModelSpec = SMALL_DEEPSEEK


D = "deployments.decode"
DECODE = "    expert_parallel: 4\n"

WRONG_TYPES = [
    Bad("quoted number", f"{D}.expert_parallel", ("an integer from 1", "plan.yaml:7"),
        "write 4 without quotes",
        DECODE, '    expert_parallel: "4"\n', value="4"),
    Bad("true as number", f"{D}.expert_parallel", ("an integer",), "the default 1 works",
        DECODE, "    expert_parallel: true\n", value=True),
    Bad("float as number", f"{D}.expert_parallel", ("an integer",), "write 4",
        DECODE, "    expert_parallel: 4.0\n", value=4.0),
    Bad("number as flag", f"{D}.deterministic", ("true or false",), "the default false works",
        sets=(f"{D}.deterministic=0",), value=0),
    Bad("yes is text", f"{D}.balancing.enabled", ("true or false",), "the default false works",
        sets=(f"{D}.balancing.enabled=yes",), value="yes"),
    Bad("1:30 is text", "server.port", ("an integer from 1024 to 65535",), "the default 8000 works",
        sets=("server.port=80:80",), value="80:80"),
    Bad("list as number", f"{D}.kv_cache.blocks", ("an integer from 1", "a list"), "the default 512 works",
        sets=(f"{D}.kv_cache.blocks=[1, 2]",), value=[1, 2]),
    Bad("number as section", f"{D}.scheduler", ("a mapping with keys of max_batch_tokens",),
        "write its keys under",
        DECODE, DECODE + "    scheduler: 5\n", value=5),
    Bad("text as deployment", D, ("a mapping with keys of instances",), "write its keys under it",
        sets=(f"{D}=fast",), value="fast"),
    Bad("list as deployments", "deployments", ("with `unified`, or with `prefill` and `decode`",),
        "for example",
        sets=("deployments=[prefill]",), value=["prefill"]),
    Bad("nothing given", f"{D}.scheduler", ("has no value", "plan.yaml:8"), "or delete the key",
        DECODE, DECODE + "    scheduler:\n"),
    Bad("infinity", "slo.tpot_ms", ("a number above 0",), "the default 100.0 works",
        sets=("slo.tpot_ms=.inf",), value=float("inf")),
    Bad("dtype of another project", "model.dtype", ("auto, float32, bfloat16 or float16",),
        "did you mean float32?",
        "float32", "fp32", value="fp32"),
    Bad("device by another name", "cluster.device", ("cpu or cuda",), "did you mean cuda?",
        sets=("cluster.device=gpu",), value="gpu"),
]  # fmt: skip

UNKNOWN_KEYS = [
    Bad("kv_cache_dtype at the top", "kv_cache_dtype", ("not a key", "plan.yaml:1"),
        "did you mean dtype in section deployments.<name>.kv_cache?",
        "model:", "kv_cache_dtype: fp8\nmodel:", value="fp8"),
    Bad("eplb.num_redundnat", "eplb.num_redundnat", ("not a key",),
        "did you mean redundant_experts in section deployments.<name>?",
        "model:", "eplb: {num_redundnat: 32}\nmodel:", value=32),
    Bad("another engine's ranks of attention", f"{D}.dp", ("not a key",), "did you mean expert_parallel?",
        DECODE, DECODE + "    dp: 2\n", value=2),
    Bad("another engine's chunk", f"{D}.chunked_prefill_size", ("not a key",),
        f"did you mean chunk_tokens in section {D}.scheduler?",
        DECODE, DECODE + "    chunked_prefill_size: 512\n", value=512),
    Bad("the only deployment is named", "expert_paralel", ("not a key",),
        "did you mean expert_parallel in section deployments.unified?",
        "model:", "expert_paralel: 1\nmodel:", text=UNIFIED, value=1),
    Bad("misplaced one level up", f"{D}.chunk_tokens", ("not a key",),
        f"did you mean chunk_tokens in section {D}.scheduler?",
        DECODE, DECODE + "    chunk_tokens: 64\n", value=64),
    Bad("misplaced one level down", f"{D}.scheduler.redundant_experts", ("not a key",),
        f"did you mean redundant_experts in section {D}?",
        DECODE, DECODE + "    scheduler: {redundant_experts: 4}\n", value=4),
    Bad("spelling", "cluster.rank_per_node", ("not a key",), "did you mean ranks_per_node?",
        "ranks_per_node", "rank_per_node", value=6),
    Bad("another engine's word", f"{D}.attention.tp", ("not a key",), "did you mean tensor_parallel?",
        DECODE, DECODE + "    attention: {tp: 4}\n", value=4),
    Bad("nothing like it", "zebra", ("not a key",),
        "valid keys here: model, cluster, deployments, server, slo",
        "model:", "zebra: 1\nmodel:", value=1),
    Bad("deployment misspelt", "deployments.decod", ("not a key",), "did you mean decode?",
        "  decode:", "  decod:"),
    Bad("unknown override", f"{D}.scheduler.chunk", ("--set",), "did you mean chunk_tokens?",
        sets=(f"{D}.scheduler.chunk=64",)),
    Bad("override of a deployment that is not there",
        "deployments.unified.expert_parallel", ("no deployment",),
        "it has prefill, decode", sets=("deployments.unified.expert_parallel=2",)),
    Bad("override without a value", "--set", ("is not key.path=value",), "server.port=8001",
        sets=("server.port",), value="server.port"),
    Bad("key given twice", f"{D}.expert_parallel", ("given twice, in lines 7 and 8",), "delete one",
        DECODE, DECODE + DECODE),
    Bad("key that is a number", D, ("'5' in line 8 is not text",), "quote it", DECODE, DECODE + "    5: 6\n"),
    Bad("model missing", "model", ("is missing",), "for example model:",
        "model: {path: checkpoint, dtype: float32}\n", ""),
    Bad("path missing", "model.path", ("is missing",), "small-deepseek-v3", "path: checkpoint, ", ""),
]  # fmt: skip

RANGES = [
    Bad("port too low", "server.port", ("from 1024 to 65535",), "1024 works", sets=("server.port=80",),
        value=80),
    Bad("port too high", "server.port", (), "65535 works", sets=("server.port=70000",), value=70000),
    Bad("no ranks", f"{D}.expert_parallel", ("from 1",), "1 works", sets=(f"{D}.expert_parallel=0",),
        value=0),
    Bad("negative slo", "slo.ttft_ms", ("above 0",), "2000.0 works", sets=("slo.ttft_ms=-5",), value=-5),
    Bad("block of 512", f"{D}.kv_cache.block_tokens", ("from 1 to 256",), "256 works",
        sets=(f"{D}.kv_cache.block_tokens=512",), value=512),
    Bad("block of 12", f"{D}.kv_cache.block_tokens", ("not a power of two",), "8 or 16 works",
        sets=(f"{D}.kv_cache.block_tokens=12", "deployments.prefill.kv_cache.block_tokens=12"), value=12),
    Bad("depth 2", f"{D}.scheduler.pipeline_depth", ("auto or an integer from 0 to 1",), "1 works",
        sets=(f"{D}.scheduler.pipeline_depth=2",), value=2),
    Bad("beyond 64 bits", f"{D}.kv_cache.blocks", ("a number beyond 64 bits",), "268435455 works",
        sets=(f"{D}.kv_cache.blocks=0x{'f' * 40}",), value=16**40 - 1),
]  # fmt: skip

CROSS_FIELD = [
    Bad("ranks do not add up", "cluster.ranks_per_node",
        ("gives 1 x 4 = 4 ranks", "need 6 (prefill 1 x 2 + decode 1 x 4)"), "set cluster.ranks_per_node: 6",
        sets=("cluster.ranks_per_node=4",), value=4),
    Bad("another number of nodes", "cluster.ranks_per_node", ("2 x 6 = 12",), "set cluster.ranks_per_node: 3",
        sets=("cluster.nodes=2",), value=6),
    Bad("nodes do not divide", "cluster.nodes", ("does not divide the 6 ranks",), "set cluster.nodes: 3",
        sets=("cluster.nodes=4", "cluster.ranks_per_node=auto"), value=4),
    Bad("prefill alone", D, ("prefill alone cannot serve",), "add decode, or call the one deployment unified",
        text=SPLIT.split("  decode:")[0]),
    Bad("unified beside another", "deployments.unified", ("cannot stand beside prefill and decode",),
        "delete unified",
        "  decode:", "  unified: {}\n  decode:"),
    Bad("no deployment", "deployments", ("names no deployment",), "add unified, or prefill and decode",
        sets=("deployments={}",), value={}),
    Bad("unequal blocks", f"{D}.kv_cache.block_tokens", ("differs from prefill's 16",), "set both to 16",
        sets=(f"{D}.kv_cache.block_tokens=32",), value=32),
    Bad("chunk over batch", f"{D}.scheduler.chunk_tokens", ("exceeds max_batch_tokens = 512",),
        "set chunk_tokens: 512 or max_batch_tokens: 600", sets=(f"{D}.scheduler.chunk_tokens=600",),
        value=600),
    Bad("sequences over batch", f"{D}.scheduler.max_sequences", ("exceeds max_batch_tokens = 512",),
        "set max_sequences: 512", sets=(f"{D}.scheduler.max_sequences=513",), value=513),
    Bad("dispatch over batch", f"{D}.dispatch.max_tokens", ("exceeds scheduler.max_batch_tokens = 512",),
        "auto or at most 512", sets=(f"{D}.dispatch.max_tokens=513",), value=513),
    Bad("KV below a chunk", f"{D}.kv_cache.blocks", ("holds 240 tokens (15 x 16)",),
        "set blocks: 16 or chunk_tokens: 240", sets=(f"{D}.kv_cache.blocks=15",), value=15),
    Bad("local with four ranks", f"{D}.dispatch.backend", ("expert_parallel is 4",), "auto or torch",
        sets=(f"{D}.dispatch.backend=local",), value="local"),
    Bad("unknown hardware", "cluster.hardware", ("not a known hardware entry",), "did you mean h100-sxm?",
        sets=("cluster.hardware=h100sxm",), value="h100sxm"),
    Bad("the first part of a hardware's name", "cluster.hardware", ("not a known hardware entry",),
        "did you mean h20-96g?", sets=("cluster.hardware=H20",), value="H20"),
    Bad("hardware unlike any", "cluster.hardware", ("not a known hardware entry",), "known: cpu-host",
        sets=("cluster.hardware=a100",), value="a100"),
    Bad("name with a line break", "server.served_name", ("unprintable",), "leave them out",
        sets=('server.served_name="a\\nb"',), value="a\nb"),
    Bad("path with a null byte", "model.path", ("unprintable",), "leave them out",
        sets=('model.path="a\\0b"',), value="a\0b"),
    Bad("GPU as CPU", "cluster.hardware", ("not for cluster.device: cpu",), "set it to cpu-host",
        sets=("cluster.hardware=h800",), value="h800"),
]  # fmt: skip

OF_THE_MODEL = [
    Bad("expert twice on a rank", f"{D}.redundant_experts", ("hold an expert twice", "33 slots"),
        "set it to at most 96", sets=(f"{D}.redundant_experts=97",), value=97),
    Bad("redundancy on one rank", "deployments.unified.redundant_experts", ("hold an expert twice",),
        "set it to at most 0", text=UNIFIED, sets=("deployments.unified.redundant_experts=1",), value=1),
    Bad("more ranks than experts", f"{D}.expert_parallel", ("leaves 2 ranks without an expert",),
        "set expert_parallel: 40 or redundant_experts: 10",
        sets=(f"{D}.expert_parallel=42", "cluster.ranks_per_node=44"), value=42),
    Bad("shared memory over nodes", f"{D}.dispatch.backend", ("nodes = 2 must be at most 1", "share memory"),
        "set it to auto",
        sets=(f"{D}.dispatch.backend=shm", "cluster.nodes=2", "cluster.ranks_per_node=3"), value="shm"),
    Bad("no shared experts", "deployments.unified.shared_experts", ("qwen3_moe has no shared experts",),
        "set it to replicated", text=UNIFIED, sets=("deployments.unified.shared_experts=slots",),
        value="slots", model=SMALL_QWEN),
    Bad("DeepGEMM without aligned rows", f"{D}.kernels.experts", ("multiples of 128",), "set it to auto",
        sets=(f"{D}.kernels.experts=deepgemm", f"{D}.dispatch.backend=torch", "cluster.device=cuda",
              "cluster.hardware=h800"), value="deepgemm"),
    Bad("latent attention of a GQA model", "deployments.unified.kernels.mla_decode", ("is not used",),
        "set it to auto", text=UNIFIED, sets=("deployments.unified.kernels.mla_decode=reference",),
        value="reference", model=SMALL_QWEN),
    Bad("shared experts of another size", f"{D}.shared_experts", ("have 300 intermediate values",),
        "set it to replicated", sets=(f"{D}.shared_experts=slots",), value="slots",
        model=replace(SMALL_DEEPSEEK, moe=replace(SMALL_DEEPSEEK.moe, shared_intermediate=300))),
    Bad("shared memory on GPUs", f"{D}.dispatch.backend", ("needs cluster.device: cpu, which is cuda",),
        "set it to auto", sets=(f"{D}.dispatch.backend=shm", "cluster.device=cuda", "cluster.hardware=h800"),
        value="shm"),
    Bad("half precision", "model.dtype", ("does not run on cpu",), "float32 or bfloat16",
        "float32", "float16", value="float16"),
]  # fmt: skip

NOT_YET = [
    Bad("tensor parallel", f"{D}.attention.tensor_parallel", ("not available in this version",),
        "set it to 1",
        sets=(f"{D}.attention.tensor_parallel=2",), value=2),
    Bad("tensor parallel 4 x data parallel 2", f"{D}.attention.tensor_parallel",
        ("tensor-parallel attention is not available in this version",), "set it to 1",
        sets=(f"{D}.attention.tensor_parallel=4", f"{D}.expert_parallel=8", "cluster.ranks_per_node=10"),
        value=4),
    Bad("rebalancing across nodes", f"{D}.balancing.enabled", ("within one node", "spans 2"),
        "set it to false", value=True,
        sets=(f"{D}.balancing.enabled=true", "cluster.nodes=3", "cluster.ranks_per_node=2")),
    Bad("rebalancing one rank", f"{D}.balancing.enabled", ("nothing to balance",), "set it to false",
        sets=(f"{D}.balancing.enabled=true", f"{D}.expert_parallel=1", "cluster.ranks_per_node=3"),
        value=True),
    Bad("interval of nothing", f"{D}.balancing.interval_tokens", ("an integer from 1",), "",
        sets=(f"{D}.balancing.interval_tokens=0",), value=0),
    Bad("batch invariant on GPUs", f"{D}.deterministic", ("no batch-invariant kernels",), "set it to false",
        sets=(f"{D}.deterministic=true", "cluster.device=cuda", "cluster.hardware=h100-sxm"), value=True),
    Bad("batch invariant over DeepEP", f"{D}.dispatch.backend", ("adds expert outputs up per rank",),
        "set it to auto",
        sets=(f"{D}.deterministic=true", f"{D}.dispatch.backend=deepep"), value="deepep"),
    Bad("a GPU library on a CPU", f"{D}.kernels.experts", ("needs cluster.device: cuda",),
        "auto or reference",
        sets=(f"{D}.kernels.experts=deepgemm",), value="deepgemm"),
    Bad("batch invariant reference", f"{D}.kernels.experts", ("is not batch-invariant",), "set it to auto",
        sets=(f"{D}.kernels.experts=reference", f"{D}.deterministic=true"), value="reference"),
    Bad("half-precision dispatch", f"{D}.dispatch.dtype", ("not available in this version",),
        "set it to auto or float32 or bfloat16 or float8_e4m3",
        sets=(f"{D}.dispatch.dtype=float16",), value="float16"),
    Bad("bf16 KV of an fp32 model", f"{D}.kv_cache.dtype", ("not available in this version",),
        "set it to auto or float32", sets=(f"{D}.kv_cache.dtype=bfloat16",), value="bfloat16"),
    Bad("KV dtype against the checkpoint's", "deployments.unified.kv_cache.dtype", ("not available",),
        "set it to auto or float32", text=UNIFIED, sets=("deployments.unified.kv_cache.dtype=bfloat16",),
        value="bfloat16"),
]  # fmt: skip

ALL = WRONG_TYPES + UNKNOWN_KEYS + RANGES + CROSS_FIELD + OF_THE_MODEL + NOT_YET


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.name)
def test_bad_plan(tmp_path: Path, bad: Bad):
    assert bad.old in bad.text, "the case changes nothing"
    text = bad.text.replace(bad.old, bad.new, 1)
    with pytest.raises(PlanError) as caught:
        checked(tmp_path, text, *bad.sets, model=bad.model)
    problems = {p.key: p for p in caught.value.problems}
    assert bad.key in problems, f"named are {list(problems)}"
    problem = problems[bad.key]
    assert bad.key in str(problem)
    assert bad.hint in problem.hint
    assert problem.hint in str(problem)
    if bad.value is not None:
        assert problem.value == bad.value
        assert type(problem.value) is type(bad.value)
    for words in bad.words:
        assert words in str(problem)
    assert "\n" not in str(problem)
    if bad.value is not None and bad.key != "--set":
        assert "(--set)" in str(problem) or "(plan.yaml:" in str(problem)


@pytest.mark.parametrize("text", [SPLIT, UNIFIED])
def test_the_plans_they_start_from_are_good(tmp_path: Path, text: str):
    checked(tmp_path, text)


def test_problems_are_told_together_in_the_order_of_the_file(tmp_path: Path):
    text = SPLIT.replace("nodes: 1", "nodes: one").replace(
        "redundant_experts: 8", "redundant: -8\n    instances: 0"
    )
    with pytest.raises(PlanError) as caught:
        checked(tmp_path, text, "slo.ttft_ms=fast")
    error = caught.value
    keys = [p.key for p in error.problems]
    assert keys == ["cluster.nodes", f"{D}.redundant", f"{D}.instances", "slo.ttft_ms"]
    lines = str(error).splitlines()
    assert [line.split(" = ")[0] for line in lines] == keys
    assert (error.key, error.value) == ("cluster.nodes", "one")


def test_rules_that_need_the_model_are_told_together(tmp_path: Path):
    sets = ("deployments.prefill.redundant_experts=33", f"{D}.redundant_experts=97")
    with pytest.raises(PlanError) as caught:
        checked(tmp_path, SPLIT, *sets)
    assert [p.key for p in caught.value.problems] == [
        "deployments.prefill.redundant_experts",
        f"{D}.redundant_experts",
    ]


def test_a_flood_of_problems_is_cut_short(tmp_path: Path):
    text = SPLIT + "".join(f"extra{i}: 1\n" for i in range(60))
    with pytest.raises(PlanError) as caught:
        checked(tmp_path, text)
    assert len(caught.value.problems) == 51
    assert str(caught.value).endswith("and 10 more problems")


@pytest.mark.parametrize("nodes", [(), ("cluster.nodes=3", "cluster.ranks_per_node=2")])
def test_rebalancing_on_gpus_can_be_planned_but_not_run(tmp_path: Path, nodes: tuple[str, ...]):
    sets = (f"{D}.balancing.enabled=true", "cluster.device=cuda", "cluster.hardware=h800", *nodes)
    _, plan, _ = checked(tmp_path, SPLIT, *sets)
    (problem,) = (p for p in unavailable_to_run(plan, lambda _: True) if "balancing" in p.path)
    assert problem.path == ("deployments", "decode", "balancing", "enabled")
    assert "runs on cpu in this version" in problem.text
