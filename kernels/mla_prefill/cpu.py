"""mla_prefill on a CPU: for each segment the form that takes fewer operations (see `forms`).

Cache entries of many segments are gathered at once; keys and values of neighbours in expanded form come
from one product. M gathered entries, n rows that attend to C of them, otherwise as the reference.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from moe_runtime.kernels.linear.cpu import linear
from moe_runtime.kernels.mla_decode.cpu import absorb_queries, masked_softmax
from moe_runtime.kernels.mla_decode.reference import split_kv_b
from moe_runtime.kernels.mla_prefill.forms import LatentSizes, absorbed_is_cheaper
from moe_runtime.kernels.paged import latent
from moe_runtime.kernels.paged.cpu import PrefillGroup, PrefillPart, query_blocks


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
    w_uk, w_uv = split_kv_b(kv_b_proj, q_TAQ, cache_BSE)
    (T, A, Q), (nope, rank) = q_TAQ.shape, w_uk.shape[1:]
    sizes = LatentSizes(heads=A, nope=nope, rope=Q - nope, value=w_uv.shape[1], rank=rank)
    q_ATQ, out_ATV = q_TAQ.transpose(0, 1), out_TX.view(T, A, -1).transpose(0, 1)

    def absorbed(part: PrefillPart) -> bool:
        return absorbed_is_cheaper(sizes, part.rows, part.context)

    for group in plan:
        stored_MX = cache_BSE.index_select(0, group.blocks).flatten(0, 1)
        entries_ME = latent.entries(stored_MX, rank, q_TAQ.dtype)
        for in_latent_space, run in groupby(group.parts, absorbed):
            if in_latent_space:
                _attend_absorbed(q_ATQ, entries_ME, tuple(run), w_uk, w_uv, scale, out_ATV)
            else:
                _attend_expanded(q_ATQ, entries_ME, tuple(run), kv_b_proj, nope, scale, out_ATV)


def _attend_expanded(
    q_ATQ: Tensor,
    entries_ME: Tensor,
    parts: Sequence[PrefillPart],
    kv_b_proj: Tensor,
    nope: int,
    scale: float,
    out_ATV: Tensor,
) -> None:
    """Neighbouring parts, their keys and values expanded by one product."""
    A, rank, begin = len(q_ATQ), kv_b_proj.shape[1], parts[0].first
    entries_ME = entries_ME[begin : parts[-1].end]
    kv_AMX = linear(entries_ME[:, :rank], kv_b_proj).view(len(entries_ME), A, -1).transpose(0, 1)
    k_rope_AdM = entries_ME[:, rank:].t().expand(A, -1, -1)
    for rows, seen, ahead_nn in query_blocks(parts):
        keys = slice(seen.start - begin, seen.stop - begin)
        q_AnQ = q_ATQ[:, rows]
        scores_AnC = torch.bmm(q_AnQ[..., :nope], kv_AMX[:, keys, :nope].transpose(1, 2))
        scores_AnC.baddbmm_(q_AnQ[..., nope:], k_rope_AdM[..., keys], beta=scale, alpha=scale)
        out_ATV[:, rows] = torch.bmm(_causal_softmax(scores_AnC, ahead_nn), kv_AMX[:, keys, nope:])


def _attend_absorbed(
    q_ATQ: Tensor,
    entries_ME: Tensor,
    parts: Sequence[PrefillPart],
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    out_ATV: Tensor,
) -> None:
    """All heads attend to the same entries, so that A * n rows are multiplied with them at once."""
    A, _, rank = w_uk.shape
    for rows, keys, ahead_nn in query_blocks(parts):
        n, entries_CE = len(ahead_nn), entries_ME[keys]
        q_AnE = q_ATQ.new_empty(A, n, entries_CE.shape[1])
        absorb_queries(q_ATQ[:, rows], w_uk, scale, out_ADE=q_AnE)
        scores_AnC = torch.mm(q_AnE.flatten(0, 1), entries_CE.t()).view(A, n, -1)
        probs_AnC = _causal_softmax(scores_AnC, ahead_nn)
        latent_AnR = torch.mm(probs_AnC.flatten(0, 1), entries_CE[:, :rank]).view(A, n, rank)
        out_ATV[:, rows] = torch.bmm(latent_AnR, w_uv.transpose(1, 2))


def _causal_softmax(scores_AnC: Tensor, ahead_nn: Tensor) -> Tensor:
    """Softmax that leaves out what of the last n tokens lies ahead of a row. Overwrites the scores."""
    scores_AnC[..., scores_AnC.shape[2] - len(ahead_nn) :].masked_fill_(ahead_nn, float("-inf"))
    return masked_softmax(scores_AnC, None)
