"""silu_mul_quantize on a GPU: the activation never reaches memory before it is quantised.

N rows, I intermediate, s slots.
"""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.quantize_fp8_block.reference import BLOCK, empty_row_scales
from moe_runtime.kernels.quantize_fp8_block.triton import COLUMNS, WARPS, row_grid, store_quantized
from moe_runtime.kernels.silu_mul.reference import Kind
from moe_runtime.kernels.silu_mul.triton import SIGNATURE, SIZES, VARIANTS, load_activated, views


@triton.jit
def _silu_mul_quantize(
    gate_ptr,
    up_ptr,
    q_ptr,
    scales_ptr,
    counts_ptr,
    rows_per_slot,
    I,
    gate_stride,
    up_stride,
    scales_stride,
    limit,
    fp8_limit,
    KIND: tl.constexpr,
    LIMITED: tl.constexpr,
    PAIRS: tl.constexpr,
    MASKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(1) * COLUMNS
    slot = tl.program_id(2)
    count = rows_per_slot
    if MASKED:
        count = tl.minimum(tl.load(counts_ptr + slot), rows_per_slot)
    for at in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = slot.to(tl.int64) * rows_per_slot + at
        gates, ups = gate_ptr + row * gate_stride, up_ptr + row * up_stride
        x = load_activated(gates, ups, first, I, limit, KIND, LIMITED, PAIRS, COLUMNS)
        store_quantized(x, q_ptr, scales_ptr, row, first, I, scales_stride, fp8_limit, POWER_OF_TWO, COLUMNS)


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
    """As the reference, up to the rounding of exp. LOCAL; the host does not wait."""
    N, I = gate_NI.shape
    q_NI = torch.empty(N, I, dtype=dtype, device=gate_NI.device)
    scales_NB = empty_row_scales(N, triton.cdiv(I, BLOCK), gate_NI.device)
    slots, rows, programs = row_grid(N, counts_s)
    gate, up, pairs = views(gate_NI, up_NI)
    _silu_mul_quantize[(programs, triton.cdiv(I, COLUMNS), slots)](
        gate,
        up,
        q_NI,
        scales_NB,
        q_NI if counts_s is None else counts_s,
        rows,
        I,
        gate.stride(0),
        up.stride(0),
        scales_NB.stride(1),
        limit,
        torch.finfo(dtype).max,
        KIND=kind,
        LIMITED=limit != math.inf,
        PAIRS=pairs,
        MASKED=counts_s is not None,
        POWER_OF_TWO=power_of_two,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return q_NI, scales_NB


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Every activation, on all rows and on masked rows, with plain and power-of-two scales."""
    pointers = SIGNATURE | {"q_ptr": f"*{target.fp8}", "scales_ptr": "*fp32", "counts_ptr": "*i32"}
    sizes = SIZES | {"scales_stride": "i32", "limit": "fp32", "fp8_limit": "fp32"}
    for name, variant in VARIANTS:
        for masked in (False, True):
            for power_of_two in (False, True):
                yield AotCase(
                    operation="silu_mul_quantize",
                    label=f"{name}{', masked rows' * masked}{', powers of two' * power_of_two}",
                    kernel=_silu_mul_quantize,
                    signature=pointers | sizes,
                    constants={
                        **variant,
                        "MASKED": masked,
                        "POWER_OF_TWO": power_of_two,
                        "COLUMNS": COLUMNS,
                    },
                    aligned=frozenset({"gate_ptr", "up_ptr", "q_ptr", "I", "gate_stride", "up_stride"}),
                    num_warps=WARPS,
                    fp_fusion=False,
                    streams=True,
                    representative=masked
                    and not power_of_two
                    and (target.name, name) in {("gfx942", "silu"), ("sm_90", "gpt-oss, interleaved")},
                )
