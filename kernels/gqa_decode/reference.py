"""gqa_decode: one new token per sequence against the paged cache, grouped-query attention.

D rows, A query heads, h key/value heads, d head dimension; a cache entry is all h keys, then all
h values. Query head a uses key/value head a // (A / h).
"""

import torch
from torch import Tensor

from moe_runtime.kernels.paged.reference import DecodePlan, sequence_entries


def gqa_decode(
    q_DAd: Tensor,
    cache_BSE: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    out_DX: Tensor,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> None:
    """Write [D, A * d] to `out`. The softmax is fp32.

    `window`: a row attends to the last `window` tokens, itself included; 0: to all. `sinks`: per head a
    logit that takes its part of the softmax and adds nothing, as gpt-oss has it.
    """
    d = q_DAd.shape[-1]
    for row, context in enumerate(plan.context_D.tolist()):
        entries_CE = sequence_entries(cache_BSE, plan.blocks_DB[row], context)
        k_hCd, v_hCd = split_heads(entries_CE[-window:], d)
        q_hgd = q_DAd[row].view(k_hCd.shape[0], -1, d)
        scores_hgC = (q_hgd @ k_hCd.to(q_DAd.dtype).transpose(1, 2)).float() * scale
        probs_AC = softmax_with_sinks(scores_hgC.flatten(0, 1), sinks_A)
        probs_hgC = probs_AC.view(scores_hgC.shape).to(q_DAd.dtype)
        out_DX[row] = (probs_hgC @ v_hCd.to(q_DAd.dtype)).reshape(-1)


def softmax_with_sinks(scores_AxC: Tensor, sinks_A: Tensor | None) -> Tensor:
    """Softmax of the last axis, each head's sink in its sum; any axes between head and last."""
    if sinks_A is None:
        return scores_AxC.softmax(-1)
    shape = (*scores_AxC.shape[:-1], 1)
    sinks = sinks_A.to(scores_AxC.dtype).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    return torch.cat((scores_AxC, sinks), -1).softmax(-1)[..., :-1]


def split_heads(entries_CE: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values [h, C, d] of cache entries [C, E]; views."""
    k_ChD, v_ChD = entries_CE.view(entries_CE.shape[0], 2, -1, head_dim).unbind(1)
    return k_ChD.transpose(0, 1), v_ChD.transpose(0, 1)
