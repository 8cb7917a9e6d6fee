"""Rows in fp8 e4m3 with one fp32 scale per 128 values: what travels in an fp8 dispatch.

T rows, H hidden. The formula is DeepEP's `per_token_cast_to_fp8`: scale = max(|x|, 1e-4) / 448.
"""

import torch
from torch import Tensor

GROUP = 128
LARGEST = 448.0
SMALLEST_AMAX = 1e-4
RELATIVE_ERROR = 2.0**-4
"""Of a value against its row group's rounding: e4m3 has 3 mantissa bits. Values below
2**-6 of the largest representable (subnormals) err by at most 2**-10 x scale instead."""


def quantize(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 [T, H], H % 128 == 0 -> e4m3 [T, H] and fp32 scales [T, H / 128]; x ~ values x scale."""
    T, H = x_TH.shape
    groups = x_TH.float().view(T, H // GROUP, GROUP)
    amax = groups.abs().amax(dim=2).clamp(min=SMALLEST_AMAX)
    values = (groups * (LARGEST / amax).unsqueeze(2)).to(torch.float8_e4m3fn).view(T, H)
    return values, amax / LARGEST


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 [..., H] and scales [..., H / 128] (any strides) -> rows in `dtype`."""
    groups = values.float().unflatten(-1, (scales.shape[-1], GROUP))
    return (groups * scales.unsqueeze(-1)).flatten(-2).to(dtype)
