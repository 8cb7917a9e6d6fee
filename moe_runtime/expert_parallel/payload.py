"""Payload: in which dtype rows travel, and what a row weighs on the wire.

Rows are converted before they are sent, so fewer bytes travel; the receiver gets them as they came
(`GroupedRows.scales`). T rows, H hidden, B scale blocks of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import SCALE_BLOCK

E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Payload:
    """`dtype` is a name of the plan's `dispatch.dtype`."""

    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def scaled(self) -> bool:
        """Whether fp32 scales travel with the values, one per 128 of them."""
        return self.dtype == "float8_e4m3"

    def num_scales(self, hidden: int) -> int:
        """B: scales of one row. ValueError if the row does not divide into blocks."""
        if not self.scaled:
            return 0
        if hidden % SCALE_BLOCK:
            raise ValueError(f"hidden = {hidden} is not a multiple of {SCALE_BLOCK}, as fp8 rows need")
        return hidden // SCALE_BLOCK

    def value_bytes(self, hidden: int) -> int:
        """Bytes of one row's values."""
        return hidden * self.torch_dtype.itemsize

    def row_bytes(self, hidden: int) -> int:
        """Bytes of one row on the wire, scales included."""
        return self.value_bytes(hidden) + 4 * self.num_scales(hidden)

    def encode(self, x_TH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values [T, H] in the payload's dtype, and scales fp32 [T, B] if there are any.

        ValueError as `num_scales`.
        """
        if self.num_scales(x_TH.shape[1]):
            return quantize(x_TH)
        return x_TH.to(self.torch_dtype), None


def quantize(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 e4m3 [T, H] and fp32 scales [T, H / 128]: value = fp8 * scale, scale = amax / 448 of its block.

    |value - x| <= max(|x| / 16, scale / 1024): half a step of 3 mantissa bits, or of the subnormals.
    Blocks whose largest value is under 1e-4 use that instead (as DeepEP does), so zeros stay zeros.
    """
    T, H = x_TH.shape
    x_TBV = x_TH.float().view(T, H // SCALE_BLOCK, SCALE_BLOCK)
    scale_TB = x_TBV.abs().amax(-1).clamp_(min=SMALLEST_AMAX).div_(E4M3_MAX)
    values = x_TBV.div(scale_TB.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn).view(T, H), scale_TB
