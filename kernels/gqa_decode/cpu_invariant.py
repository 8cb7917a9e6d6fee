"""gqa_decode on a CPU, batch-invariant: the arithmetic of gqa_prefill (see `paged.cpu_invariant`)."""

import torch
from torch import Tensor

from moe_runtime.kernels.paged.cpu_invariant import RowPlan, attend


def gqa_decode(q_DAd: Tensor, cache_BSE: Tensor, plan: RowPlan, scale: float, *, out_DX: Tensor) -> None:
    """As the reference, up to rounding."""
    attend_heads(q_DAd, cache_BSE, plan, scale, out_DX)


def attend_heads(q_TAd: Tensor, cache_BSE: Tensor, plan: RowPlan, scale: float, out_TX: Tensor) -> None:
    """Write the plan's rows to `out` [T, A * d]. Query head a uses key/value head a // (A / h)."""
    if not len(plan.rows_n):
        return
    (A, d), E = q_TAd.shape[1:], cache_BSE.shape[2]
    kv_heads = E // (2 * d)

    def heads(entries_nCE: Tensor, which: int) -> Tensor:
        """Keys (0) or values (1) as [n * h, C, d]."""
        n, C, _ = entries_nCE.shape
        both = entries_nCE.view(n, C, 2, kv_heads, d)[:, :, which]
        return both.transpose(1, 2).reshape(n * kv_heads, C, d)

    def scores(q_nAd: Tensor, entries_nCE: Tensor) -> Tensor:
        q = q_nAd.reshape(-1, A // kv_heads, d)
        return torch.bmm(q, heads(entries_nCE, 0).transpose(1, 2)).view(len(q_nAd), A, -1)

    def values(probs_nAC: Tensor, entries_nCE: Tensor) -> Tensor:
        probs = probs_nAC.reshape(-1, A // kv_heads, probs_nAC.shape[-1])
        return torch.bmm(probs, heads(entries_nCE, 1)).view(len(probs_nAC), A, d)

    out_nAd = attend(q_TAd[plan.rows_n].float() * scale, cache_BSE, plan, scores, values)
    out_TX[plan.rows_n] = out_nAd.flatten(1).to(out_TX.dtype)
