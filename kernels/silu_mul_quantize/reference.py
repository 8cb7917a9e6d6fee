"""silu_mul_quantize: the gated activation, quantised by 1 x 128 blocks for the product that follows.

N rows, I intermediate, B = ceil(I / 128), s slots.
"""

import math

import torch
from torch import Tensor

from moe_runtime.kernels.quantize_fp8_block.reference import quantize_fp8_block
from moe_runtime.kernels.silu_mul.reference import Kind, silu_mul


def silu_mul_quantize(
    gate_NI: Tensor,
    up_NI: Tensor,
    *,
    kind: Kind = "silu",
    limit: float = math.inf,
    power_of_two: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    counts_s: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [N, I] in `dtype` and scales fp32 [N, B], as `quantize_fp8_block` makes them of `silu_mul`.

    The activation is rounded to the dtype of its input before it is quantised.
    """
    activated_NI = silu_mul(gate_NI, up_NI, kind=kind, limit=limit)
    return quantize_fp8_block(activated_NI, power_of_two=power_of_two, dtype=dtype, counts_s=counts_s)
