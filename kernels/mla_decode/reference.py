"""mla_decode: one new token per sequence against the paged latent cache, in absorbed form.

With k_nope = W_UK c and v = W_UV c (c the cached latent), q.k_nope = (W_UK^T q).c, and the
weighted sum of v is W_UV applied to the weighted sum of c: keys and values are never expanded.
The cache holds entries as they are or, if its dtype is uint8, packed (`paged.latent`).
D rows, A heads, Q = nope + rope per query head, V per value head, R latent rank, E = R + rope.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

import torch
from torch import Tensor

from moe_runtime.kernels.paged import latent
from moe_runtime.kernels.paged.reference import DecodePlan, sequence_entries


def mla_decode(
    q_DAQ: Tensor, cache_BSE: Tensor, plan: DecodePlan, kv_b_proj: Tensor, scale: float, *, out_DX: Tensor
) -> None:
    """Write [D, A * V] to `out`. `kv_b_proj` [A * (nope + V), R]: per head W_UK, then W_UV."""
    w_uk, w_uv = split_kv_b(kv_b_proj, q_DAQ, cache_BSE)
    nope, rank = w_uk.shape[1:]
    for row, context in enumerate(plan.context_D.tolist()):
        rows_CE = sequence_entries(cache_BSE, plan.blocks_DB[row], context)
        entries_CE = latent.entries(rows_CE, rank, q_DAQ.dtype)
        q_AR = torch.einsum("an,anr->ar", q_DAQ[row, :, :nope], w_uk)
        scores_AC = q_AR @ entries_CE[:, :rank].T + q_DAQ[row, :, nope:] @ entries_CE[:, rank:].T
        probs_AC = (scores_AC.float() * scale).softmax(-1).to(q_DAQ.dtype)
        latent_AR = probs_AC @ entries_CE[:, :rank]
        out_DX[row] = torch.einsum("ar,avr->av", latent_AR, w_uv).reshape(-1)


def split_kv_b(kv_b_proj: Tensor, q_TAQ: Tensor, cache_BSE: Tensor) -> tuple[Tensor, Tensor]:
    """W_UK [A, nope, R] and W_UV [A, V, R], both views of `kv_b_proj`."""
    heads, rank = q_TAQ.shape[1], kv_b_proj.shape[1]
    nope = q_TAQ.shape[2] - latent.rope_dim(cache_BSE, rank)
    per_head = kv_b_proj.view(heads, -1, rank)
    return per_head[:, :nope], per_head[:, nope:]
