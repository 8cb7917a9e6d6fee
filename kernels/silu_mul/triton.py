"""silu_mul on a GPU; `load_activated` is the device function that its quantising form shares.

N rows, I intermediate, s slots. Gate and up are two views with columns one or two apart: halves of a
product, or interleaved, which is then read as one run of memory.
"""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.quantize_fp8_block.triton import COLUMNS, WARPS, row_grid
from moe_runtime.kernels.silu_mul.reference import GPT_OSS_ALPHA, Kind

_ALPHA = tl.constexpr(GPT_OSS_ALPHA)


@triton.jit
def load_activated(
    gate_ptr,
    up_ptr,
    first,
    I,
    limit,
    KIND: tl.constexpr,
    LIMITED: tl.constexpr,
    PAIRS: tl.constexpr,
    N: tl.constexpr,
):
    """fp32 [N], values of the dtype of `gate_ptr`: columns first .. first + N of a row, zero past I."""
    column = first + tl.arange(0, N)
    if PAIRS:
        pair = 2 * first + tl.arange(0, 2 * N)
        both = tl.load(gate_ptr + pair, mask=pair < 2 * I, other=0.0)
        gate, up = tl.split(tl.reshape(both, (N, 2)))
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    else:
        gate = tl.load(gate_ptr + column, mask=column < I, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + column, mask=column < I, other=0.0).to(tl.float32)
    dtype = gate_ptr.dtype.element_ty
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "gpt_oss":
        activated = gate * tl.div_rn(1.0, 1.0 + tl.exp(-(gate * _ALPHA))) * (up + 1.0)
    else:
        silu = tl.div_rn(gate, 1.0 + tl.exp(-gate))
        if not LIMITED:
            silu = silu.to(dtype).to(tl.float32)
        activated = silu * up
    return activated.to(dtype).to(tl.float32)


@triton.jit
def _silu_mul(
    gate_ptr,
    up_ptr,
    out_ptr,
    counts_ptr,
    rows_per_slot,
    I,
    gate_stride,
    up_stride,
    limit,
    KIND: tl.constexpr,
    LIMITED: tl.constexpr,
    PAIRS: tl.constexpr,
    MASKED: tl.constexpr,
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
        activated = load_activated(gates, ups, first, I, limit, KIND, LIMITED, PAIRS, COLUMNS)
        column = first + tl.arange(0, COLUMNS)
        tl.store(out_ptr + row * I + column, activated.to(out_ptr.dtype.element_ty), mask=column < I)


def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    kind: Kind = "silu",
    limit: float = math.inf,
    counts_s: Tensor | None = None,
) -> Tensor:
    """As the reference, up to the rounding of exp; [N, I]. LOCAL; the host does not wait."""
    N, I = gate.shape
    out_NI = torch.empty(N, I, dtype=gate.dtype, device=gate.device)
    slots, rows, programs = row_grid(N, counts_s)
    gate, up, pairs = views(gate, up)
    _silu_mul[(programs, triton.cdiv(I, COLUMNS), slots)](
        gate,
        up,
        out_NI,
        out_NI if counts_s is None else counts_s,
        rows,
        I,
        gate.stride(0),
        up.stride(0),
        limit,
        KIND=kind,
        LIMITED=limit != math.inf,
        PAIRS=pairs,
        MASKED=counts_s is not None,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return out_NI


def views(gate_NI: Tensor, up_NI: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Both as a kernel may read them, and whether they alternate in memory."""
    if gate_NI.shape != up_NI.shape or gate_NI.dtype != up_NI.dtype:
        raise KernelError(f"gate is {gate_NI.dtype} {gate_NI.shape}, up {up_NI.dtype} {up_NI.shape}")
    apart = up_NI.data_ptr() - gate_NI.data_ptr()
    if gate_NI.stride(1) == up_NI.stride(1) == 2 and apart == gate_NI.element_size():
        return gate_NI, up_NI, True
    if gate_NI.stride(1) != 1 or up_NI.stride(1) != 1:
        return gate_NI.contiguous(), up_NI.contiguous(), False
    return gate_NI, up_NI, False


VARIANTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("silu", {"KIND": "silu", "LIMITED": False, "PAIRS": False}),
    ("clamped silu", {"KIND": "silu", "LIMITED": True, "PAIRS": False}),
    ("gpt-oss, interleaved", {"KIND": "gpt_oss", "LIMITED": True, "PAIRS": True}),
)
SIGNATURE = {"gate_ptr": "*bf16", "up_ptr": "*bf16"}
SIZES = dict.fromkeys(("rows_per_slot", "I", "gate_stride", "up_stride"), "i32")


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Every activation, on all rows and on masked rows."""
    del target
    for name, variant in VARIANTS:
        for masked in (False, True):
            yield AotCase(
                operation="silu_mul",
                label=f"{name}{', masked rows' if masked else ''}",
                kernel=_silu_mul,
                signature=SIGNATURE | {"out_ptr": "*bf16", "counts_ptr": "*i32"} | SIZES | {"limit": "fp32"},
                constants={**variant, "MASKED": masked, "COLUMNS": COLUMNS},
                aligned=frozenset({"gate_ptr", "up_ptr", "out_ptr", "I", "gate_stride", "up_stride"}),
                num_warps=WARPS,
                fp_fusion=False,
                streams=True,
            )
