"""The counted operations of the two forms of latent attention, against those that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_runtime.kernels.mla_prefill.forms import (
    LatentSizes,
    absorbed_is_cheaper,
    absorbed_operations,
    expanded_operations,
)
from moe_runtime.kernels.registry import select
from moe_runtime.models.context import PrefillSegment

SIZES = LatentSizes(heads=4, nope=6, rope=2, value=5, rank=10)
DEEPSEEK = LatentSizes(heads=128, nope=128, rope=64, value=128, rank=512)
BLOCK = 4


def counted(column, *, rows, context):
    """Operations of `mla_prefill` for one segment."""
    s = SIZES
    entries = torch.randn(-(-(context + rows) // BLOCK), BLOCK, s.rank + s.rope)
    segment = PrefillSegment(start=0, stop=rows, context=context, blocks=torch.arange(len(entries)))
    plan = select("plan_prefill", column)([segment], block_tokens=BLOCK)
    q, out = torch.randn(rows, s.heads, s.nope + s.rope), torch.empty(rows, s.heads * s.value)
    kv_b = torch.randn(s.heads * (s.nope + s.value), s.rank)
    with FlopCounterMode(display=False) as counter:
        select("mla_prefill", column)(q, entries, plan, kv_b, 0.1, out_TX=out)
    return counter.get_total_flops()


@pytest.mark.parametrize("context", [7, 30])  # one row, whole blocks: nothing is computed in vain
def test_the_forms_take_what_torch_counts(context):
    assert counted("any", rows=1, context=context) == expanded_operations(SIZES, 1, context)
    assert counted("cpu", rows=1, context=context) == absorbed_operations(SIZES, 1, context)


def test_many_rows_take_what_each_takes_alone_but_expand_once():
    alone = [(SIZES, 1, 20 + i) for i in range(8)]
    assert absorbed_operations(SIZES, 8, 20) == sum(absorbed_operations(*row) for row in alone)
    expand = 2 * SIZES.heads * SIZES.rank * (SIZES.nope + SIZES.value)
    rows = sum(expanded_operations(s, n, context) - expand * (context + n) for s, n, context in alone)
    assert expanded_operations(SIZES, 8, 20) == rows + expand * 28


def test_short_chunks_after_long_contexts_are_absorbed():
    """At the ends: 131072 operations per head and cached token to expand, 768 more per pair to absorb."""
    assert [n for n in (1, 64, 160, 170, 171, 4096) if absorbed_is_cheaper(DEEPSEEK, n, 10**6)] == [
        1,
        64,
        160,
        170,
    ]
    assert not any(absorbed_is_cheaper(DEEPSEEK, n, 0) for n in (1, 16, 4096))
    assert absorbed_is_cheaper(DEEPSEEK, 16, 16)
