"""mla_prefill: chunks of prompts against the paged latent cache, in expanded form.

Keys and values of all attended tokens are expanded from the latent; the rope part of a key is
shared by the heads. T rows, n rows of a segment, C = context + n, otherwise as mla_decode.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.gqa_decode.reference import softmax_with_sinks
from moe_runtime.kernels.mla_decode.reference import split_kv_b
from moe_runtime.kernels.paged import latent
from moe_runtime.kernels.paged.reference import Segment, sequence_entries


def mla_prefill(
    q_TAQ: Tensor,
    cache_BSE: Tensor,
    plan: Sequence[Segment],
    kv_b_proj: Tensor,
    scale: float,
    *,
    out_TX: Tensor,
) -> None:
    """Write the rows of the segments to `out` [T, A * V]; other rows are left alone."""
    w_uk, w_uv = split_kv_b(kv_b_proj, q_TAQ, cache_BSE)
    rank = w_uk.shape[2]
    for segment in plan:
        rows = slice(segment.start, segment.stop)
        total = segment.context + segment.stop - segment.start
        rows_CE = sequence_entries(cache_BSE, segment.blocks, total)
        entries_CE = latent.entries(rows_CE, rank, q_TAQ.dtype)
        k_nope_ACn = torch.einsum("cr,anr->acn", entries_CE[:, :rank], w_uk)
        k_rope_ACd = entries_CE[:, rank:].expand(len(w_uk), -1, -1)
        v_ACV = torch.einsum("cr,avr->acv", entries_CE[:, :rank], w_uv)
        out = causal_attention(
            q_TAQ[rows].transpose(0, 1),
            torch.cat((k_nope_ACn, k_rope_ACd), -1),
            v_ACV,
            segment.context,
            scale,
        )
        out_TX[rows] = out.transpose(0, 1).flatten(1)


def causal_attention(
    q_AnQ: Tensor,
    k_ACQ: Tensor,
    v_ACV: Tensor,
    context: int,
    scale: float,
    *,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> Tensor:
    """[A, n, V]: row i attends to tokens 0 .. context + i, or the last `window` of them. fp32 softmax."""
    n, C = q_AnQ.shape[1], k_ACQ.shape[1]
    scores_AnC = (q_AnQ @ k_ACQ.transpose(1, 2)).float() * scale
    every_nC = torch.ones(n, C, dtype=torch.bool, device=q_AnQ.device)
    hidden_nC = every_nC.triu(context + 1)
    if window:
        hidden_nC |= every_nC.tril(context - window)
    probs_AnC = softmax_with_sinks(scores_AnC.masked_fill(hidden_nC, float("-inf")), sinks_A)
    return probs_AnC.to(v_ACV.dtype) @ v_ACV
