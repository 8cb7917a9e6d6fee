"""gqa_decode: one new token per sequence against the paged cache, grouped-query attention.

D rows, A query heads, h key/value heads, d head dimension; a cache entry is all h keys, then all
h values. Query head a uses key/value head a // (A / h).
"""

from torch import Tensor

from moe_runtime.kernels.paged.reference import DecodePlan, sequence_entries


def gqa_decode(q_DAd: Tensor, cache_BSE: Tensor, plan: DecodePlan, scale: float, *, out_DX: Tensor) -> None:
    """Write [D, A * d] to `out`. The softmax is fp32."""
    for row, context in enumerate(plan.context_D.tolist()):
        k_hCd, v_hCd = split_heads(sequence_entries(cache_BSE, plan.blocks_DB[row], context), q_DAd.shape[-1])
        q_hgd = q_DAd[row].view(k_hCd.shape[0], -1, q_DAd.shape[-1])
        scores_hgC = (q_hgd @ k_hCd.to(q_DAd.dtype).transpose(1, 2)).float() * scale
        out_DX[row] = (scores_hgC.softmax(-1).to(q_DAd.dtype) @ v_hCd.to(q_DAd.dtype)).reshape(-1)


def split_heads(entries_CE: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values [h, C, d] of cache entries [C, E]; views."""
    k_ChD, v_ChD = entries_CE.view(entries_CE.shape[0], 2, -1, head_dim).unbind(1)
    return k_ChD.transpose(0, 1), v_ChD.transpose(0, 1)
