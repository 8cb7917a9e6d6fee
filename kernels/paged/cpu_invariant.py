"""Batch-invariant attention over a paged cache on a CPU (see `fixed_rows`): row by row, the same for a
row of a prompt and a decoded one, KEYS cache entries at a time from position 0 on.

A row's result depends on its query and on the entries it attends to, not on chunking, other rows,
or where its blocks lie. A place past the row's last token gathers the sequence's first entry:
always valid, whereas what lies there belongs to nobody and may hold NaN.
n rows, C = KEYS, A heads, V values per head, B blocks per sequence, S tokens per block, E values per entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.fixed_rows import KEYS, exp
from moe_runtime.kernels.paged.reference import Segment

ROWS_AT_ONCE = 128  # bounds the gathered entries: 19 MB of 576 floats


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows that attend, longest context first.

    rows int64 [n]: where they stand in the step; length int64 [n]: entries attended to;
    blocks int64 [n, B]: those of the row's sequence, 0 padded
    """

    rows_n: Tensor
    length_n: Tensor
    blocks_nB: Tensor
    block_tokens: int


def plan_decode(blocks_DB: Tensor, context_D: Tensor, *, max_context: int, block_tokens: int) -> RowPlan:
    """The rows of a batch of single tokens."""
    del max_context
    return _longest_first(torch.arange(len(context_D)), context_D, blocks_DB, block_tokens)


def plan_prefill(segments: Sequence[Segment], *, block_tokens: int) -> RowPlan:
    """The rows of all segments, each with the context of its own position."""
    rows, length, blocks = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)], []
    width = max((len(s.blocks) for s in segments), default=0)
    for s in segments:
        n = s.stop - s.start
        rows.append(torch.arange(s.start, s.stop))
        length.append(torch.arange(s.context + 1, s.context + n + 1))
        padded = s.blocks.new_zeros(width)
        padded[: len(s.blocks)] = s.blocks
        blocks.append(padded.expand(n, width))
    blocks_nB = torch.cat(blocks) if blocks else torch.zeros(0, 0, dtype=torch.int64)
    return _longest_first(torch.cat(rows), torch.cat(length), blocks_nB, block_tokens)


def _longest_first(rows_n: Tensor, length_n: Tensor, blocks_nB: Tensor, block_tokens: int) -> RowPlan:
    order = length_n.argsort(descending=True, stable=True)
    return RowPlan(rows_n[order], length_n[order], blocks_nB[order], block_tokens)


def attend(
    q_nAE: Tensor,
    cache_BSE: Tensor,
    plan: RowPlan,
    scores: Callable[[Tensor, Tensor], Tensor],
    values: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """fp32 [n, A, V]: softmax-weighted values of the plan's rows, whose queries are `q` in the plan's order.

    `scores(q, entries_nCE)` gives fp32 [n, A, C], `values(probs_nAC, entries_nCE)` fp32 [n, A, V]; both
    must treat rows alike. Softmax as in arXiv 2112.05682: a running maximum, sum and weighted sum.
    """
    parts = [
        _attend(q_nAE[part], cache_BSE.view(-1, cache_BSE.shape[-1]), _part(plan, part), scores, values)
        for begin in range(0, len(q_nAE), ROWS_AT_ONCE)
        for part in [slice(begin, begin + ROWS_AT_ONCE)]
    ]
    return torch.cat(parts)


def _part(plan: RowPlan, part: slice) -> RowPlan:
    return RowPlan(plan.rows_n[part], plan.length_n[part], plan.blocks_nB[part], plan.block_tokens)


def _attend(
    q_nAE: Tensor,
    flat_cache: Tensor,
    plan: RowPlan,
    scores: Callable[[Tensor, Tensor], Tensor],
    values: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    n, A = q_nAE.shape[:2]
    peak_nA = torch.full((n, A), float("-inf"))
    total_nA, sum_nAV = torch.zeros(n, A), None
    for begin in range(0, int(plan.length_n[0]), KEYS):
        m = int((plan.length_n > begin).sum())  # rows that reach this far: the first m
        entries_mCE, beyond_mC = _entries(flat_cache, plan, m, begin)
        scores_mAC = scores(q_nAE[:m], entries_mCE).masked_fill_(beyond_mC[:, None], float("-inf"))
        new_mA = torch.maximum(peak_nA[:m], scores_mAC.amax(-1))
        decay_mA = exp(peak_nA[:m] - new_mA)
        probs_mAC = exp(scores_mAC - new_mA[..., None])
        weighted_mAV = values(probs_mAC, entries_mCE)
        if sum_nAV is None:
            sum_nAV = torch.zeros(n, A, weighted_mAV.shape[-1])
        peak_nA[:m] = new_mA
        total_nA[:m] = total_nA[:m] * decay_mA + probs_mAC.sum(-1)
        sum_nAV[:m] = sum_nAV[:m] * decay_mA[..., None] + weighted_mAV
    assert sum_nAV is not None
    return sum_nAV / total_nA[..., None]


def _entries(flat_cache: Tensor, plan: RowPlan, m: int, begin: int) -> tuple[Tensor, Tensor]:
    """fp32 [m, C, E]: entries begin .. begin + C of the first m rows, and which of them lie past the end."""
    position_C = torch.arange(begin, begin + KEYS)
    beyond_mC = position_C >= plan.length_n[:m, None]
    position_mC = position_C.expand(m, KEYS).masked_fill(beyond_mC, 0)
    block_mC = plan.blocks_nB[:m].gather(1, position_mC // plan.block_tokens)
    rows_mC = block_mC * plan.block_tokens + position_mC % plan.block_tokens
    return flat_cache[rows_mC].float(), beyond_mC
