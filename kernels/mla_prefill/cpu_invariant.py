"""mla_prefill on a CPU, batch-invariant: the arithmetic of mla_decode, row by row."""

from torch import Tensor

from moe_runtime.kernels.mla_decode.cpu_invariant import attend_latent
from moe_runtime.kernels.paged.cpu_invariant import RowPlan


def mla_prefill(
    q_TAQ: Tensor, cache_BSE: Tensor, plan: RowPlan, kv_b_proj: Tensor, scale: float, *, out_TX: Tensor
) -> None:
    """As the reference, up to rounding."""
    attend_latent(q_TAQ, cache_BSE, plan, kv_b_proj, scale, out_TX)
