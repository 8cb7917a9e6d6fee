"""mla_prefill and gqa_prefill under the interpreter against dense attention in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.errors import KernelError
from moe_runtime.models.context import PrefillSegment
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import normal, poisoned
from tests.kernels.triton.paged import Paged, dense, expanded, grouped, paged

gqa_prefill = interpreted("gqa_prefill")
mla_prefill = interpreted("mla_prefill")
plans = interpreted("paged")

BEFORE = 2  # decode rows in front, which prefill must leave alone
SCALE = 0.2
# (tokens in the cache before, rows of the chunk)
CHUNKS = ((0, 129), (129, 7), (7, 1), (100, 28))
HEADS, KV_HEADS, DIM = 4, 2, 32
MLA_HEADS, NOPE, ROPE, RANK, V = 2, 16, 16, 64, 16


def segments(cache: Paged, chunks: Any) -> list[PrefillSegment]:
    """The chunks as rows of one step, in order; a table may be longer than what is cached."""
    found, row = [], BEFORE
    for table, (context, n) in zip(cache.tables_DB, chunks, strict=True):
        found.append(PrefillSegment(start=row, stop=row + n, context=context, blocks=table))
        row += n
    return found


def gqa(cache: Paged, steps: list[PrefillSegment], q_TAd: Tensor, **options) -> Tensor:
    out_TX = torch.full((len(q_TAd), HEADS * DIM), 7.0, dtype=q_TAd.dtype)
    plan = plans.plan_prefill(steps, block_tokens=cache.cache_BSE.shape[1])
    with poisoned():
        gqa_prefill.gqa_prefill(q_TAd, cache.cache_BSE, plan, SCALE, out_TX=out_TX, **options)
    return out_TX


def mla(cache: Paged, steps: list[PrefillSegment], q_TAQ: Tensor, kv_b: Tensor) -> Tensor:
    out_TX = torch.full((len(q_TAQ), MLA_HEADS * V), 7.0, dtype=q_TAQ.dtype)
    plan = plans.plan_prefill(steps, block_tokens=cache.cache_BSE.shape[1])
    with poisoned():
        mla_prefill.mla_prefill(q_TAQ, cache.cache_BSE, plan, kv_b, SCALE, out_TX=out_TX)
    return out_TX


def mla_weights(dtype: torch.dtype) -> Tensor:
    return (normal(MLA_HEADS * (NOPE + V), RANK, seed=2) / RANK**0.5).to(dtype)


def check(
    out_TX: Tensor, q_TAQ: Tensor, steps: Any, keys_values: Any, tolerance: float, **options: Any
) -> None:
    """Errors are relative to a row's largest weighted sum of |v|: weights are rounded before they meet v."""
    assert torch.equal(out_TX[:BEFORE], torch.full_like(out_TX[:BEFORE], 7.0))
    for segment, (k, v) in zip(steps, keys_values, strict=True):
        rows = slice(segment.start, segment.stop)
        options["context"] = segment.context
        want, size = (dense(q_TAQ[rows], k, x, SCALE, **options).flatten(1) for x in (v, v.abs()))
        error = (out_TX[rows].double() - want).abs().amax(-1) / size.amax(-1)
        assert error.max() <= tolerance


@pytest.mark.parametrize(
    ("dtype", "block_tokens", "window", "with_sinks", "tolerance"),
    [
        (torch.float32, 64, 0, False, 1e-6),
        (torch.bfloat16, 16, 0, False, 4e-3),
        (torch.float32, 16, 40, True, 1e-6),
        (torch.bfloat16, 64, 1, True, 4e-3),
    ],
)
def test_gqa(dtype, block_tokens, window, with_sinks, tolerance):
    cache = paged([sum(c) for c in CHUNKS], 2 * KV_HEADS * DIM, block_tokens, dtype)
    steps = segments(cache, CHUNKS)
    q_TAd = normal(steps[-1].stop, HEADS, DIM, seed=1, dtype=dtype)
    options = {"window": window, "sinks_A": normal(HEADS, seed=2) if with_sinks else None}
    keys_values = [grouped(e, HEADS, DIM) for e in cache.entries]
    check(gqa(cache, steps, q_TAd, **options), q_TAd, steps, keys_values, tolerance, **options)


@pytest.mark.parametrize(
    ("dtype", "packed", "block_tokens", "tolerance"),
    [
        (torch.float32, False, 16, 1e-6),
        (torch.bfloat16, False, 64, 4e-3),
        (torch.float32, True, 64, 1e-6),
    ],
)
def test_mla(dtype, packed, block_tokens, tolerance, monkeypatch):
    monkeypatch.setattr(mla_prefill, "EXPANDED_BYTES", 2**16)  # one head at a time
    width = RANK + ROPE
    cache = paged([sum(c) for c in CHUNKS], width, block_tokens, dtype, packed_rank=RANK * packed)
    steps = segments(cache, CHUNKS)
    q_TAQ = normal(steps[-1].stop, MLA_HEADS, NOPE + ROPE, seed=1, dtype=dtype)
    kv_b = mla_weights(dtype)
    # Expanded keys and values are of the model's type, here as in the reference.
    both = [expanded(e, kv_b, NOPE, MLA_HEADS) for e in cache.entries]
    keys_values = [tuple(x.to(dtype).double() for x in pair) for pair in both]
    check(mla(cache, steps, q_TAQ, kv_b), q_TAQ, steps, keys_values, tolerance)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_row_depends_neither_on_chunks_nor_on_other_sequences(kind):
    width = 2 * KV_HEADS * DIM if kind == "gqa" else RANK + ROPE
    cache = paged((70, 20), width, 16, torch.bfloat16)
    whole = segments(cache, ((0, 70), (0, 20)))
    first = PrefillSegment(start=BEFORE, stop=BEFORE + 33, context=0, blocks=whole[0].blocks)
    second = PrefillSegment(start=BEFORE + 33, stop=BEFORE + 70, context=33, blocks=whole[0].blocks)
    heads = HEADS if kind == "gqa" else MLA_HEADS
    q_TAx = normal(BEFORE + 90, heads, DIM, seed=1, dtype=torch.bfloat16)
    kv_b = mla_weights(torch.bfloat16)
    outputs = [
        gqa(cache, steps, q_TAx) if kind == "gqa" else mla(cache, steps, q_TAx, kv_b)
        for steps in (whole, [first], [second])
    ]
    rows = slice(BEFORE, BEFORE + 33)
    assert torch.equal(outputs[1][rows], outputs[0][rows])
    rows = slice(BEFORE + 33, BEFORE + 70)
    assert torch.equal(outputs[2][rows], outputs[0][rows])


def test_heads_at_a_time_fit_and_are_even():
    assert mla_prefill.heads_at_a_time(128, 2**22) == 128
    assert mla_prefill.heads_at_a_time(128, 2**25) == 16
    assert mla_prefill.heads_at_a_time(96, 2**29 // 50) == 48
    assert mla_prefill.heads_at_a_time(4, 2**40) == 1


def test_plan_covers_every_row_once_and_begins_with_the_longest():
    cache = paged((300, 20), 8, 16, torch.float32)
    plan = plans.plan_prefill(segments(cache, ((40, 260), (0, 20))), block_tokens=16)
    rows = [r for start, n, *_ in plan.tiles_WF.tolist() for r in range(start, start + n)]
    assert sorted(rows) == list(range(BEFORE, BEFORE + 280))
    positions = [position for _, _, position, *_ in plan.tiles_WF.tolist()]
    assert positions == [296, 168, 40, 0]
    assert plan.blocks_N.tolist() == [*cache.tables_DB[0].tolist(), *cache.tables_DB[1, :2].tolist()]
    assert plan.blocks_N.dtype == torch.int32


def test_nothing_to_prefill():
    cache = paged((16,), 2 * KV_HEADS * DIM, 16, torch.float32)
    out_TX = gqa(cache, [], normal(BEFORE, HEADS, DIM))
    assert torch.equal(out_TX, torch.full_like(out_TX, 7.0))


def test_decode_plan_refuses_blocks_the_kernels_do_not_take():
    with pytest.raises(KernelError, match="block_tokens is 8, the kernels take 16 to 64"):
        plans.plan_decode(torch.zeros(1, 1), torch.ones(1), max_context=1, block_tokens=8)
