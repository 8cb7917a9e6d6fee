"""mla_decode on a CPU: batched products over groups of sequences, the latent gathered once per layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.mla_decode.reference import split_kv_b
from moe_runtime.kernels.paged import latent
from moe_runtime.kernels.paged.cpu import DecodeGroup


def mla_decode(
    q_DAQ: Tensor,
    cache_BSE: Tensor,
    plan: Sequence[DecodeGroup],
    kv_b_proj: Tensor,
    scale: float,
    *,
    out_DX: Tensor,
) -> None:
    """As the reference, up to rounding."""
    w_uk, w_uv = split_kv_b(kv_b_proj, q_DAQ, cache_BSE)
    (D, A, Q), (nope, rank), X = q_DAQ.shape, w_uk.shape[1:], cache_BSE.shape[2]
    q_DAE = q_DAQ.new_empty(D, A, rank + Q - nope)
    absorb_queries(q_DAQ.transpose(0, 1), w_uk, scale, out_ADE=q_DAE.transpose(0, 1))
    flat_cache = cache_BSE.view(-1, X)
    latent_DAR = q_DAQ.new_empty(D, A, rank)
    for group in plan:
        q_GAE = q_DAE if group.members is None else q_DAE.index_select(0, group.members)
        rows = flat_cache.index_select(0, group.rows)
        entries_GCE = latent.entries(rows, rank, q_DAQ.dtype).view(len(q_GAE), -1, q_DAE.shape[2])
        probs_GAC = masked_softmax(torch.bmm(q_GAE, entries_GCE.transpose(1, 2)), group.padded_G1C)
        latent_GAR = torch.bmm(probs_GAC, entries_GCE[..., :rank])
        if group.members is None:
            latent_DAR = latent_GAR
        else:
            latent_DAR.index_copy_(0, group.members, latent_GAR)
    out_ADV = torch.bmm(latent_DAR.transpose(0, 1), w_uv.transpose(1, 2))
    out_DX.view(D, A, -1).copy_(out_ADV.transpose(0, 1))


def absorb_queries(q_ADQ: Tensor, w_uk_AnR: Tensor, scale: float, *, out_ADE: Tensor) -> None:
    """Queries in the latent's space, then their rope part: what is multiplied with cache entries. Scaled."""
    nope, rank = w_uk_AnR.shape[1:]
    torch.mul(torch.bmm(q_ADQ[..., :nope], w_uk_AnR), scale, out=out_ADE[..., :rank])
    torch.mul(q_ADQ[..., nope:], scale, out=out_ADE[..., rank:])


def masked_softmax(scores: Tensor, masked: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax of the last axis in fp32, in the dtype of the scores (which are overwritten).

    `sinks`: a logit per row of the last but one axis, which takes part in the sum.
    """
    if masked is not None:
        scores.masked_fill_(masked, float("-inf"))
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    column = sinks.to(scores.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)
    probs = torch.cat((scores, column), -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return probs.to(scores.dtype)
