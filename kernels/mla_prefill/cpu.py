"""mla_prefill on a CPU: keys and values expanded for many segments at once, attended per segment.

Query rows go in blocks, so that a block's scores span only the tokens up to its last row: less
than the full square, and small enough to stay in cache.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.linear.cpu import linear
from moe_runtime.kernels.mla_decode.cpu import masked_softmax
from moe_runtime.kernels.paged import latent
from moe_runtime.kernels.paged.cpu import PrefillGroup, PrefillPart

QUERY_BLOCK = 128


def mla_prefill(
    q_TAQ: Tensor,
    cache_BSE: Tensor,
    plan: Sequence[PrefillGroup],
    kv_b_proj: Tensor,
    scale: float,
    *,
    out_TX: Tensor,
) -> None:
    """As the reference, up to rounding."""
    (T, A, Q), rank = q_TAQ.shape, kv_b_proj.shape[1]
    rope = latent.rope_dim(cache_BSE, rank)
    nope = Q - rope
    q_ATQ, out_TAV = q_TAQ.transpose(0, 1), out_TX.view(T, A, -1)
    for group in plan:
        stored_MX = cache_BSE.index_select(0, group.blocks).flatten(0, 1)
        entries_ME = latent.entries(stored_MX, rank, q_TAQ.dtype)
        kv_AMX = linear(entries_ME[:, :rank], kv_b_proj).view(len(entries_ME), A, -1).transpose(0, 1)
        k_rope_AdM = entries_ME[:, rank:].t().expand(A, rope, len(entries_ME))
        for rows, keys, ahead in query_blocks(group.parts):
            q_AnQ = q_ATQ[:, rows]
            scores_AnC = torch.bmm(q_AnQ[..., :nope], kv_AMX[:, keys, :nope].transpose(1, 2))
            scores_AnC.baddbmm_(q_AnQ[..., nope:], k_rope_AdM[..., keys], beta=scale, alpha=scale)
            scores_AnC[..., scores_AnC.shape[2] - ahead.shape[1] :].masked_fill_(ahead, float("-inf"))
            out_AnV = torch.bmm(masked_softmax(scores_AnC, None), kv_AMX[:, keys, nope:])
            out_TAV[rows] = out_AnV.transpose(0, 1)


def query_blocks(parts: Sequence[PrefillPart]) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows of the step, gathered entries they may see, bool [n, n]: what of the last n entries is ahead)."""
    for part in parts:
        for start in range(part.start, part.stop, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, part.stop)
            last = part.first + part.context + stop - part.start
            n = stop - start
            yield slice(start, stop), slice(part.first, last), torch.ones(n, n, dtype=torch.bool).triu(1)
