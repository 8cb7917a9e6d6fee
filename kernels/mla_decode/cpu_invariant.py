"""mla_decode on a CPU, batch-invariant: absorbed form, as mla_prefill's, so that both give a row the
same bits (see `paged.cpu_invariant`).
"""

import torch
from torch import Tensor

from moe_runtime.kernels.fixed_rows import product_per_head
from moe_runtime.kernels.mla_decode.reference import split_kv_b
from moe_runtime.kernels.paged.cpu_invariant import RowPlan, attend


def mla_decode(
    q_DAQ: Tensor, cache_BSE: Tensor, plan: RowPlan, kv_b_proj: Tensor, scale: float, *, out_DX: Tensor
) -> None:
    """As the reference, up to rounding."""
    attend_latent(q_DAQ, cache_BSE, plan, kv_b_proj, scale, out_DX)


def attend_latent(
    q_TAQ: Tensor, cache_BSE: Tensor, plan: RowPlan, kv_b_proj: Tensor, scale: float, out_TX: Tensor
) -> None:
    """Write the plan's rows to `out` [T, A * V]."""
    if not len(plan.rows_n):
        return
    w_uk, w_uv = split_kv_b(kv_b_proj, q_TAQ, cache_BSE)
    nope, rank = w_uk.shape[1:]
    q_nAQ = q_TAQ[plan.rows_n]
    absorbed_nAR = product_per_head(q_nAQ[..., :nope], w_uk)
    q_nAE = torch.cat((absorbed_nAR, q_nAQ[..., nope:]), -1).float() * scale
    latent_nAR = attend(
        q_nAE,
        cache_BSE,
        plan,
        scores=lambda q, entries: torch.bmm(q, entries.transpose(1, 2)),
        values=lambda probs, entries: torch.bmm(probs, entries[..., :rank]),
    ).to(q_TAQ.dtype)
    out_nAV = product_per_head(latent_nAR, w_uv.transpose(1, 2))
    out_TX[plan.rows_n] = out_nAV.flatten(1)
