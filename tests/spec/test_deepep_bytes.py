"""DeepEP's buffer sizes by its published formulas, and limits that need more than one size."""

from dataclasses import replace

import pytest

from moe_runtime.plan.deepep import MODE_OF_ROLE, auto_max_tokens, mode_violations, registered_bytes
from moe_runtime.plan.effective import EffectiveDispatch, ModeChoice
from moe_runtime.spec.bytes import GIB
from moe_runtime.spec.deepep_bytes import (
    LOW_LATENCY_LIMIT_BYTES,
    elastic_buffer_bytes,
    low_latency_buffer_bytes,
    low_latency_max_tokens,
    normal_buffer_bytes,
)
from moe_runtime.spec.limits import LIMITS, DispatchSizes, violations

MIB = 1 << 20
V3 = DispatchSizes(ranks=32, slots=288, hidden=7168, top_k=8, max_tokens=128, row_bytes=14336, nodes=4)


def normal_by_hand(hidden: int, ranks: int, chunk: int, rdma_chunk: int) -> tuple[int, int]:
    """The two hints of `Config`, written out for 20 SMs; a row has room for 128 ids, weights, scales."""
    nodes, row = max(1, ranks // 8), 2 * hidden + 8 + 128 * 8 + 128 * 4 + 128 * 4
    nvl = 10 * min(ranks, 8) * (2 * nodes + 3) * 4 + 10 * min(ranks, 8) * chunk * row
    rdma = 10 * nodes * 18 * 2 * 4 + 10 * nodes * rdma_chunk * 2 * (row + 16)
    return -(-nvl // 128) * 128, -(-rdma // 128) * 128 if ranks > 8 else 0


@pytest.mark.parametrize(
    ("ranks", "chunk", "rdma_chunk"),
    [(2, 256, 0), (8, 256, 0), (16, 288, 140), (32, 288, 128), (96, 480, 132), (144, 720, 132)],
)
def test_normal_mode(ranks, chunk, rdma_chunk):
    assert normal_buffer_bytes(hidden=7168, ranks=ranks) == normal_by_hand(7168, ranks, chunk, rdma_chunk)


def test_normal_mode_has_a_configuration_for_exactly_the_ranks_of_its_limit():
    (limit,) = [m for m in LIMITS["deepep_normal"] if m.quantity == "ranks"]
    assert limit.one_of is not None
    for ranks in range(1, 200):
        if ranks in limit.one_of:
            normal_buffer_bytes(hidden=7168, ranks=ranks)
        else:
            with pytest.raises(KeyError):
                normal_buffer_bytes(hidden=7168, ranks=ranks)


def test_elastic_within_a_node_is_rows_of_every_rank():
    """8 ranks x 8192 tokens of 7168 + 896 + 128 bytes come in, 8 x 8192 of 14336 + 64 go out."""
    sizes = {"max_tokens": 8192, "hidden": 7168, "ranks": 8, "ranks_per_node": 8}
    assert elastic_buffer_bytes(**sizes, top_k=8, fp8=True) == 8 * 8192 * 14400
    assert elastic_buffer_bytes(**sizes, top_k=2, fp8=True) == 8 * 8192 * (7168 + 896 + 32)
    assert elastic_buffer_bytes(**sizes, top_k=8, fp8=False) == 8 * 8192 * (14336 + 128)


def test_elastic_across_nodes():
    """Dispatch of 4 nodes x 8 ranks: 32 M per rank, M to send, 4 (M + 1280) per node."""
    got = elastic_buffer_bytes(max_tokens=4096, hidden=7168, top_k=8, ranks=32, ranks_per_node=8, fp8=False)
    rows = 32 * 4096 + 4096 + 4 * (4096 + 1280)
    back = 8 * 4 * 4096 + 4 * 4096 + 4 * (4096 + 1280)
    assert got == -(-max(rows * (14336 + 128), back * (14336 + 64)) // (2 * MIB)) * 2 * MIB


def dispatch(mode: ModeChoice, dtype: str = "bfloat16", max_tokens: int = 128) -> EffectiveDispatch:
    return EffectiveDispatch(backend="deepep", dtype=dtype, max_tokens=max_tokens, mode=mode)


@pytest.mark.parametrize("mode", MODE_OF_ROLE.values())
def test_registered_bytes_come_from_physical_slots(mode):
    got = registered_bytes(dispatch(mode), hidden=7168, slots=288, ranks=32)
    low_latency = low_latency_buffer_bytes(max_tokens=128, hidden=7168, slots=288)
    assert round(low_latency / 1e9, 3) == 2.147
    both = {"normal": sum(normal_buffer_bytes(hidden=7168, ranks=32)), "low_latency": low_latency}
    assert got == (both if mode == "per_step" else {mode: both[mode]})


@pytest.mark.parametrize(
    ("mode", "ranks", "sequences", "batch", "tokens"),
    [
        ("normal", 32, 64, 8192, 8192),
        ("low_latency", 32, 64, 512, 64),
        ("low_latency", 32, 1024, 4096, 255),
        ("low_latency", 2, 1024, 4096, 254),
        ("low_latency", 3, 63, 512, 64),
        ("low_latency", 1, 1024, 4096, 252),
        ("per_step", 8, 64, 512, 255),
        ("per_step", 8, 64, 200, 200),
    ],
)
def test_rows_of_a_round_that_low_latency_mode_carries(mode, ranks, sequences, batch, tokens):
    found, why = auto_max_tokens(mode, ranks=ranks, max_sequences=sequences, max_batch_tokens=batch)
    assert found == tokens
    sizes = DispatchSizes(ranks=ranks, slots=ranks, hidden=7168, top_k=8, max_tokens=found, row_bytes=14336)
    if mode != "normal":
        assert violations("deepep_low_latency", sizes) == ()
        assert why.endswith("in low-latency mode")


def broken(mode: ModeChoice, sizes: DispatchSizes, dtype: str = "bfloat16") -> list[tuple[str, str, str]]:
    found = mode_violations(dispatch(mode, dtype), sizes)
    return [(mode, v.limit.kind, v.message) for mode, v in found]


def test_ep_320_is_a_warning_for_decode_and_refused_for_prefill():
    ep_320 = replace(V3, ranks=320, slots=320, nodes=40)
    (warned,) = broken("low_latency", ep_320)
    assert warned == ("deepep_low_latency", "tested", "ranks = 320 must be at most 256")
    (refused,) = broken("normal", ep_320)
    assert refused[:2] == ("deepep_normal", "hard")
    assert refused[2].startswith("ranks = 320 must be one of 2, 4, 8")
    assert [mode for mode, _, _ in broken("per_step", ep_320)] == ["deepep_normal", "deepep_low_latency"]


def test_fp8_rows_need_whole_blocks():
    odd = replace(V3, hidden=2880)
    assert broken("normal", odd) == []
    assert broken("normal", odd, "float8_e4m3") == [
        ("deepep_normal", "hard", "hidden in fp8 = 2880 must be a multiple of 128 (one scale per 128 values)")
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 264, "slots": 264, "nodes": 33}, "nodes = 33 must be at most 32"),
        ({"ranks": 66, "slots": 66, "nodes": 1}, "ranks per node = 66 must be at most 64"),
    ],
)
def test_elastic_domains(changes, words):
    messages = [v.message for v in violations("deepep_elastic", replace(V3, **changes))]
    assert any(words in m for m in messages)


def test_many_slots_are_beyond_what_was_tested():
    many = replace(V3, ranks=8, slots=2048, nodes=1, max_tokens=16)
    assert [(v.limit.kind, v.value) for v in violations("deepep_low_latency", many)] == [("tested", 2048)]


@pytest.mark.parametrize(
    ("tokens", "slots", "gib"),
    [(2048, 448, 35.55), (1840, 448, 31.94), (1536, 448, 26.66), (2048, 384, 30.47)],
)
def test_low_latency_buffer_counts_physical_experts(tokens, slots, gib):
    size = low_latency_buffer_bytes(max_tokens=tokens, hidden=5120, slots=slots)
    assert size / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize(
    ("tokens", "slots", "gigabytes"),
    [(128, 256, 1.908), (128, 288, 2.147), (128, 384, 2.863), (256, 288, 4.294)],
)
def test_low_latency_buffer_of_deepseek_v3(tokens, slots, gigabytes):
    size = low_latency_buffer_bytes(max_tokens=tokens, hidden=7168, slots=slots)
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.001)


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_low_latency_tokens_of_a_budget_are_the_most(multiple_of):
    tokens = low_latency_max_tokens(
        budget_bytes=LOW_LATENCY_LIMIT_BYTES, hidden=5120, slots=448, multiple_of=multiple_of
    )
    assert tokens == {1: 1843, 8: 1840}[multiple_of]
    fits = low_latency_buffer_bytes(max_tokens=tokens, hidden=5120, slots=448)
    more = low_latency_buffer_bytes(max_tokens=tokens + multiple_of, hidden=5120, slots=448)
    assert fits <= LOW_LATENCY_LIMIT_BYTES < more
    assert low_latency_max_tokens(budget_bytes=10, hidden=5120, slots=448) == 0
