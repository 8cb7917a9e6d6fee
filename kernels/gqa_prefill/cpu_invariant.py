"""gqa_prefill on a CPU, batch-invariant: row by row (see `paged.cpu_invariant`)."""

from torch import Tensor

from moe_runtime.kernels.gqa_decode.cpu_invariant import attend_heads
from moe_runtime.kernels.paged.cpu_invariant import RowPlan


def gqa_prefill(q_TAd: Tensor, cache_BSE: Tensor, plan: RowPlan, scale: float, *, out_TX: Tensor) -> None:
    """As the reference, up to rounding."""
    attend_heads(q_TAd, cache_BSE, plan, scale, out_TX)
