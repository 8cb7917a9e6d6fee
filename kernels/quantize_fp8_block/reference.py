"""quantize_fp8_block: e4m3 values with an fp32 scale per 1 x 128 (activations) or 128 x 128 (weights) block.

N rows, K columns, B = ceil(K / 128) blocks of a row, s slots. Source of the format: DeepSeek-V3 (arXiv
2412.19437), section 3.3; of the scales' layout and rounding: DeepGEMM's per_token_cast_to_fp8.
"""

from typing import Literal

import torch
from torch import Tensor

BLOCK = 128
SMALLEST = 1e-10  # of a block's largest magnitude: no division by zero


def quantize_fp8_block(
    x_NK: Tensor,
    *,
    rows_per_block: Literal[1, 128] = 1,
    power_of_two: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    counts_s: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [N, K] in `dtype` and scales fp32: x is about q * scale.

    scale = max |x| of the block / the largest value of `dtype`, with `power_of_two` rounded up to one
    (so that it also is an e8m0). Scales of rows are [N, B], column by column with columns at multiples
    of 16 bytes, as tensor descriptors want them; scales of blocks [ceil(N / 128), B].
    With `counts` int32 [s], x is s equal parts of which only the first counts[i] rows hold anything
    (masked rows); the rest of q and scales is not written. Only for rows.
    """
    N, K = x_NK.shape
    B = -(-K // BLOCK)
    grid = -(-N // rows_per_block)
    padded = x_NK.new_zeros(grid * rows_per_block, B * BLOCK, dtype=torch.float32)
    padded[:N, :K] = x_NK
    blocks = padded.view(grid, rows_per_block, B, BLOCK)
    scales_gB = block_scales(blocks.abs().amax((1, 3)), dtype, power_of_two)
    scaled = (blocks / scales_gB[:, None, :, None]).view(padded.shape)[:N, :K]
    limit = torch.finfo(dtype).max
    q_NK = scaled.clamp(-limit, limit).to(dtype)
    if rows_per_block != 1:
        return q_NK, scales_gB
    out_NB = empty_row_scales(N, B, x_NK.device)
    out_NB.copy_(scales_gB)
    return q_NK, out_NB


def block_scales(largest: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """fp32: the scale of blocks whose largest magnitudes are given."""
    scales = largest.clamp_min(SMALLEST) / torch.finfo(dtype).max
    if power_of_two:  # any bit of the mantissa carries into the exponent
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scales


def empty_row_scales(rows: int, blocks: int, device: torch.device) -> Tensor:
    """fp32 [rows, blocks], not initialised: column by column, columns at multiples of 16 bytes."""
    stride = -(-rows // 4) * 4
    return torch.empty(blocks, stride, dtype=torch.float32, device=device)[:, :rows].t()
