"""quantize_fp8_block on a GPU: blocks of a row, or of a weight, are read once and written once.

N rows, K columns, s slots. `scale` and `to_fp8` are the device functions that every quantising kernel uses.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.quantize_fp8_block.reference import BLOCK, SMALLEST, empty_row_scales

COLUMNS = 1024  # of a row per program
WARPS = 2
PROGRAMS = 2048  # about, for masked rows, whose number the host does not know
_SMALLEST = tl.constexpr(SMALLEST)


@triton.jit
def scale(largest, limit, POWER_OF_TWO: tl.constexpr):
    """fp32 scale of a block with the given largest magnitude."""
    scales = tl.div_rn(tl.maximum(largest, _SMALLEST), limit)
    if POWER_OF_TWO:
        bits = (scales.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scales = bits.to(tl.float32, bitcast=True)
    return scales


@triton.jit
def to_fp8(x, scales, limit, dtype: tl.constexpr):
    """Saturated; NaN stays NaN, where a plain minimum would make a number of it."""
    scaled = tl.div_rn(x, scales)
    return tl.clamp(scaled, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def store_quantized(
    x,
    q_ptr,
    scales_ptr,
    row,
    first,
    K,
    scales_stride,
    limit,
    POWER_OF_TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store COLUMNS values of a row from column `first` on (fp32, zeros past K), and their scales."""
    BLOCKS: tl.constexpr = COLUMNS // 128
    x = tl.reshape(x, (BLOCKS, 128))
    scales = scale(tl.max(tl.abs(x), 1), limit, POWER_OF_TWO)
    q = to_fp8(x, scales[:, None], limit, q_ptr.dtype.element_ty)
    column = first + tl.arange(0, COLUMNS)
    tl.store(q_ptr + row * K + column, tl.reshape(q, (COLUMNS,)), mask=column < K)
    block = first // 128 + tl.arange(0, BLOCKS)
    tl.store(scales_ptr + block.to(tl.int64) * scales_stride + row, scales, mask=block * 128 < K)


@triton.jit
def _quantize_rows(
    x_ptr,
    q_ptr,
    scales_ptr,
    counts_ptr,
    rows_per_slot,
    K,
    x_stride,
    scales_stride,
    limit,
    MASKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    slot = tl.program_id(2)
    count = rows_per_slot
    if MASKED:
        count = tl.minimum(tl.load(counts_ptr + slot), rows_per_slot)
    for at in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = slot.to(tl.int64) * rows_per_slot + at
        x = tl.load(x_ptr + row * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
        store_quantized(x, q_ptr, scales_ptr, row, first, K, scales_stride, limit, POWER_OF_TWO, COLUMNS)


@triton.jit
def _quantize_blocks(
    x_ptr, q_ptr, scales_ptr, N, K, x_stride, limit, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (column < K)[None, :]
    at = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + at * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scales = scale(tl.max(tl.max(tl.abs(x), 1), 0), limit, POWER_OF_TWO)
    tl.store(q_ptr + at * K + column[None, :], to_fp8(x, scales, limit, q_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scales)


def quantize_fp8_block(
    x_NK: Tensor,
    *,
    rows_per_block: Literal[1, 128] = 1,
    power_of_two: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    counts_s: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference, bit for bit. LOCAL; the host does not wait."""
    if x_NK.stride(1) != 1:
        x_NK = x_NK.contiguous()
    (N, K), limit = x_NK.shape, torch.finfo(dtype).max
    q_NK = torch.empty(N, K, dtype=dtype, device=x_NK.device)
    if rows_per_block == BLOCK:
        grid = (triton.cdiv(N, BLOCK), triton.cdiv(K, BLOCK))
        scales = torch.empty(grid, dtype=torch.float32, device=x_NK.device)
        _quantize_blocks[grid](
            x_NK, q_NK, scales, N, K, x_NK.stride(0), limit, power_of_two, BLOCK, num_warps=8
        )
        return q_NK, scales
    scales = empty_row_scales(N, triton.cdiv(K, BLOCK), x_NK.device)
    slots, rows, programs = row_grid(N, counts_s)
    _quantize_rows[(programs, triton.cdiv(K, COLUMNS), slots)](
        x_NK,
        q_NK,
        scales,
        q_NK if counts_s is None else counts_s,
        rows,
        K,
        x_NK.stride(0),
        scales.stride(1),
        limit,
        MASKED=counts_s is not None,
        POWER_OF_TWO=power_of_two,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return q_NK, scales


def row_grid(N: int, counts_s: Tensor | None) -> tuple[int, int, int]:
    """Slots, rows per slot, and programs per slot: one per row, but bounded where counts are not known."""
    if counts_s is None:
        return 1, N, N
    slots = len(counts_s)
    if not slots:
        return 0, 0, 0
    rows = N // slots
    return slots, rows, min(rows, max(1, PROGRAMS // slots))


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Rows, all and masked, with plain and power-of-two scales; and weights."""
    signature = {"x_ptr": "*bf16", "q_ptr": f"*{target.fp8}", "scales_ptr": "*fp32"}
    for masked in (False, True):
        for power_of_two in (False, True):
            yield AotCase(
                operation="quantize_fp8_block",
                label=f"{'masked ' if masked else ''}rows{', powers of two' if power_of_two else ''}",
                kernel=_quantize_rows,
                signature=signature
                | {"counts_ptr": "*i32"}
                | dict.fromkeys(("rows_per_slot", "K", "x_stride", "scales_stride"), "i32")
                | {"limit": "fp32"},
                constants={"MASKED": masked, "POWER_OF_TWO": power_of_two, "COLUMNS": COLUMNS},
                aligned=frozenset({"x_ptr", "q_ptr", "scales_ptr", "K", "x_stride"}),
                num_warps=WARPS,
                fp_fusion=False,
                streams=True,
                representative=target.name == "sm_100" and masked and not power_of_two,
            )
    assert all(model.hidden % 128 == 0 for model in shapes.MODELS)
    yield AotCase(
        operation="quantize_fp8_block",
        label="weights",
        kernel=_quantize_blocks,
        signature=signature | {"N": "i32", "K": "i32", "x_stride": "i32", "limit": "fp32"},
        constants={"POWER_OF_TWO": False, "BLOCK": BLOCK},
        aligned=frozenset({"x_ptr", "q_ptr", "K", "x_stride"}),
        num_warps=8,
        streams=True,
    )
