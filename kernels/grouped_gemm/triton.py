"""grouped_gemm as one persistent Triton kernel for all weight formats.

Programs stay and walk over the tiles of all slots, counted from `counts` on the device: nothing
waits for the host, and one grid serves every number of rows. The tiles of a slot follow one another
in bands of row tiles, row tiles first: programs that run together share a slot's weights, which then
come from memory once. On Hopper and later, tiles arrive through tensor descriptors; elsewhere
through aligned pointers.

fp8: the products of 128 inputs are summed by the matrix units and then, scaled, in fp32.
Four-bit weights become bf16 in registers: int4 as 128 + nibble, whose bits are the nibble or-ed into
a constant; e2m1 as sign, exponent and mantissa in bf16's places, which is the value times 2 ** -126.
Both are exact up to the product with the scale (an e8m0 scale of 0 counts as zero, not as 2 ** -127).
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.chip import chip_of
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.grouped_gemm.configurations import cases, constants
from moe_runtime.kernels.grouped_gemm.formats import GROUP, Weight, inputs, outputs
from moe_runtime.kernels.grouped_gemm.reference import result_dtype
from moe_runtime.kernels.grouped_gemm.tiles import Format, Tile, format_of, tile_shape

# Arguments whose value or divisibility must not make a new kernel: they change from step to step.
_VARYING = ["num_rows", "num_slots", "x_row", "x_block"]


@triton.jit
def tile_ends(
    starts,
    counts,
    num_rows,
    num_slots,
    output_tiles,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    GAPS: tl.constexpr,
):
    """int32 [SLOTS], a power of two >= num_slots: the number of tiles of all slots up to each.

    With GAPS a slot has tiles up to the next slot's start, so that gap rows can be written. Whatever
    starts and counts say, no tile lies past the rows; `locate` cuts them alike.
    """
    slot = tl.arange(0, SLOTS)
    real = slot < num_slots
    start = tl.minimum(tl.load(starts + slot, mask=real, other=0), num_rows)
    if GAPS:
        next_start = tl.load(starts + slot + 1, mask=slot + 1 < num_slots, other=num_rows)
        span = tl.where(real, tl.minimum(next_start, num_rows) - start, 0)
    else:
        span = tl.minimum(tl.load(counts + slot, mask=real, other=0), num_rows - start)
    return tl.cumsum(tl.cdiv(span, ROWS) * output_tiles)


@triton.jit
def locate(
    tile,
    ends,
    starts,
    counts,
    num_rows,
    num_slots,
    output_tiles,
    ROWS: tl.constexpr,
    BAND: tl.constexpr,
    GAPS: tl.constexpr,
):
    """(slot, first row, rows of the slot from there on, rows to write from there on, output tile)."""
    slot = tl.sum((ends <= tile).to(tl.int32))
    tile -= tl.max(tl.where(ends <= tile, ends, 0))
    start = tl.minimum(tl.load(starts + slot), num_rows)
    count = tl.minimum(tl.load(counts + slot), num_rows - start)
    span = count
    if GAPS:
        next_start = tl.load(starts + slot + 1, mask=slot + 1 < num_slots, other=num_rows)
        span = tl.minimum(next_start, num_rows) - start
    first = tile // (BAND * output_tiles) * BAND
    height = tl.minimum(tl.cdiv(span, ROWS) - first, BAND)
    tile -= first * output_tiles
    row = (first + tile % height) * ROWS
    return slot, start + row, count - row, span - row, tile // height


@triton.jit
def store(
    acc,
    y,
    row_weights,
    row,
    valid,
    span,
    output,
    num_outputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GAPS: tl.constexpr,
):
    """Write the tile's first `span` rows; those from `valid` on, which belong to no slot, as zero."""
    m = tl.arange(0, ROWS)
    n = output + tl.arange(0, OUTPUTS)
    if row_weights is not None:
        acc *= tl.load(row_weights + row + m, mask=m < valid, other=0.0)[:, None]
    if GAPS:
        acc = tl.where(m[:, None] < valid, acc, 0.0)
    y += row.to(tl.int64) * num_outputs + m[:, None] * num_outputs + n[None, :]
    tl.store(y, acc.to(y.dtype.element_ty), mask=(m[:, None] < span) & (n[None, :] < num_outputs))


@triton.jit
def widen(q, scales, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, INT4: tl.constexpr, FP32: tl.constexpr):
    """bf16 [OUTPUTS, DEPTH] of words [OUTPUTS, DEPTH / 8] and scales [OUTPUTS, DEPTH / 32], see `formats`.

    FP32: computed in it, which gives the same bits and is for chips that do not compute in bf16.
    """
    GROUPS: tl.constexpr = DEPTH // 32
    shift = 4 * tl.arange(0, 4)
    pairs = q.to(tl.uint32, bitcast=True).reshape(OUTPUTS, GROUPS, 1, 4) >> shift[None, None, :, None]
    pairs = (
        (pairs & 0x000F000F) | 0x43004300
        if INT4
        else ((pairs & 0x00070007) << 6) | ((pairs & 0x00080008) << 12)
    )
    low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    values = tl.join(low, high).reshape(OUTPUTS, GROUPS, 32)
    if not INT4:
        scales = (scales.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
    if FP32:
        values, scales = values.to(tl.float32), scales.to(tl.float32)
    values = values - 136.0 if INT4 else values * 85070591730234615865843651857942052864.0
    return (values * scales[:, :, None]).to(tl.bfloat16).reshape(OUTPUTS, DEPTH)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def grouped_gemm_kernel(
    x,
    x_scales,
    w,
    w_scales,
    row_weights,
    y,
    starts,
    counts,
    num_rows,
    num_slots,
    num_outputs,
    num_inputs,
    groups,
    x_row,
    x_block,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    GAPS: tl.constexpr,
    SLOTS: tl.constexpr,
    BAND: tl.constexpr,
):
    PACKED: tl.constexpr = (FORMAT == "int4") | (FORMAT == "mxfp4")
    WIDTH: tl.constexpr = DEPTH // 8 if PACKED else DEPTH  # elements of a row of w that hold DEPTH inputs
    GROUPS: tl.constexpr = DEPTH // 32
    w_row = num_inputs
    if PACKED:
        num_inputs = groups * 32
        w_row = groups * 4
    steps = tl.cdiv(num_inputs, DEPTH)
    output_tiles = tl.cdiv(num_outputs, OUTPUTS)
    ends = tile_ends(starts, counts, num_rows, num_slots, output_tiles, SLOTS, ROWS, GAPS)
    for tile in tl.range(tl.program_id(0), tl.max(ends), tl.num_programs(0)):
        slot, row, valid, span, output = locate(
            tile, ends, starts, counts, num_rows, num_slots, output_tiles, ROWS, BAND, GAPS
        )
        output *= OUTPUTS
        # Clamped, as rows and outputs past the end are read and not used.
        m = tl.minimum(row + tl.arange(0, ROWS), num_rows - 1)
        n = tl.minimum(output + tl.arange(0, OUTPUTS), num_outputs - 1)
        if not DESCRIPTORS:
            k = tl.arange(0, DEPTH)
            kw = tl.arange(0, WIDTH)
            x_at = x + m.to(tl.int64)[:, None] * num_inputs + k[None, :]
            w_at = w + slot.to(tl.int64) * num_outputs * w_row + n[:, None] * w_row + kw[None, :]
        if FORMAT == "fp8":
            x_scales_at = x_scales + m.to(tl.int64) * x_row
            w_scales_at = w_scales + (slot * tl.cdiv(num_outputs, 128) + output // 128) * steps
        if PACKED:
            g = tl.arange(0, GROUPS)
            scales_row = slot.to(tl.int64) * num_outputs + n
            if ROW_SCALES:
                word: tl.constexpr = tl.pointer_type(tl.int64 if FORMAT == "int4" else tl.int32)
                w_scales_at = w_scales.to(word) + scales_row * (groups // 4)
            else:
                w_scales_at = w_scales + scales_row[:, None] * groups + g[None, :]
        acc = tl.zeros((OUTPUTS, ROWS) if SWAP else (ROWS, OUTPUTS), tl.float32)
        # A tile of gap rows only has nothing to multiply.
        depth = tl.where(valid > 0, steps, 0) if GAPS else steps
        for step in range(0, depth):
            if DESCRIPTORS:
                a = x.load([row, step * DEPTH])
                b = w.load([slot * num_outputs + output, step * WIDTH])
            elif WHOLE:
                a = tl.load(x_at)
                b = tl.load(w_at)
            else:
                a = tl.load(x_at, mask=k[None, :] < num_inputs - step * DEPTH, other=0.0)
                b = tl.load(w_at, mask=kw[None, :] < w_row - step * WIDTH, other=0.0)
            if not DESCRIPTORS:
                x_at += DEPTH
                w_at += WIDTH
            if PACKED:
                if ROW_SCALES:
                    scales = tl.load(w_scales_at)[:, None]
                    if FORMAT == "int4":
                        scales = (scales >> 16 * g[None, :]).to(tl.uint16).to(tl.bfloat16, bitcast=True)
                    else:
                        scales = (scales >> 8 * g[None, :]) & 0xFF
                elif WHOLE:
                    scales = tl.load(w_scales_at)
                else:
                    scales = tl.load(w_scales_at, mask=g[None, :] < groups - step * GROUPS, other=0)
                w_scales_at += 1 if ROW_SCALES else GROUPS
                b = widen(b, scales, OUTPUTS, DEPTH, FORMAT == "int4", not DESCRIPTORS)
            if FORMAT == "fp8":
                scale = tl.load(x_scales_at) * tl.load(w_scales_at)
                x_scales_at += x_block
                w_scales_at += 1
                if SWAP:
                    acc += tl.dot(b, a.T) * scale[None, :]
                else:
                    acc += tl.dot(a, b.T) * scale[:, None]
            elif FORMAT == "fp32":
                acc = tl.dot(a, b.T, acc, input_precision="ieee")
            elif SWAP:
                acc = tl.dot(b, a.T, acc)
            else:
                acc = tl.dot(a, b.T, acc)
        if SWAP:
            acc = acc.T
        store(acc, y, row_weights, row, valid, span, output, num_outputs, ROWS, OUTPUTS, GAPS)


def grouped_gemm(
    x_NK: Tensor,
    weight_sOK: Weight,
    starts_s: Tensor,
    counts_s: Tensor,
    *,
    x_scales_NB: Tensor | None = None,
    row_weights_N: Tensor | None = None,
    zero_gaps: bool = True,
    out_dtype: torch.dtype | None = None,
    rows_per_slot: int | None = None,
) -> Tensor:
    """As the reference, up to the order of sums; the host waits for nothing.

    x and the weight's tensors are contiguous, a row of each a multiple of 16 bytes. Without
    `rows_per_slot` as many rows are expected of a slot as x has per slot, which is far too many for
    masked rows: give it there.
    """
    chip = chip_of(x_NK)
    expected = -(-x_NK.shape[0] // max(1, len(counts_s))) if rows_per_slot is None else rows_per_slot
    return grouped_gemm_tiled(
        x_NK,
        weight_sOK,
        starts_s,
        counts_s,
        tile=tile_shape(format_of(weight_sOK), expected, chip.target),
        descriptors=chip.target.tensor_descriptors,
        multiprocessors=chip.multiprocessors,
        x_scales_NB=x_scales_NB,
        row_weights_N=row_weights_N,
        zero_gaps=zero_gaps,
        out_dtype=out_dtype,
    )


def grouped_gemm_tiled(
    x_NK: Tensor,
    weight_sOK: Weight,
    starts_s: Tensor,
    counts_s: Tensor,
    *,
    tile: Tile,
    descriptors: bool,
    multiprocessors: int,
    x_scales_NB: Tensor | None = None,
    row_weights_N: Tensor | None = None,
    zero_gaps: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`grouped_gemm` with a given tile. KernelError for tensors that the kernel cannot read."""
    form = format_of(weight_sOK)
    _check(x_NK, weight_sOK, x_scales_NB, form)
    values, scales = (weight_sOK, None) if isinstance(weight_sOK, Tensor) else weight_sOK
    (N, K), O, s = x_NK.shape, outputs(weight_sOK), len(counts_s)
    y_NO = x_NK.new_empty(N, O, dtype=out_dtype or result_dtype(x_NK))
    if not (N and s and K):
        return y_NO.zero_()
    x, w = x_NK, values
    weights_N = None if row_weights_N is None else row_weights_N.contiguous()
    if descriptors:
        x = TensorDescriptor.from_tensor(x_NK, [tile.rows, tile.depth])
        width = tile.depth * values.shape[2] // K
        w = TensorDescriptor.from_tensor(values.view(s * O, -1), [tile.outputs, width])
    most_tiles = (-(-N // tile.rows) + s) * -(-O // tile.outputs)
    grid = (min(multiprocessors * tile.programs, most_tiles),)
    grouped_gemm_kernel[grid](
        x,
        x_scales_NB,
        w,
        scales,
        weights_N,
        y_NO,
        starts_s,
        counts_s,
        N,
        s,
        O,
        K,
        K // GROUP,
        *((0, 0) if x_scales_NB is None else x_scales_NB.stride()),
        **constants(form, tile, K, descriptors=descriptors, gaps=zero_gaps, slots=s),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    return y_NO


def _check(x_NK: Tensor, weight_sOK: Weight, x_scales_NB: Tensor | None, form: Format) -> None:
    K = inputs(weight_sOK)
    tensors = (weight_sOK,) if isinstance(weight_sOK, Tensor) else weight_sOK
    wanted = tensors[0].dtype if form in ("fp32", "16bit", "fp8") else torch.bfloat16
    if x_NK.shape[1] != K or x_NK.dtype is not wanted:
        raise KernelError(
            f"grouped_gemm: rows {tuple(x_NK.shape)} {x_NK.dtype}, the weight takes {K} inputs in {wanted}"
        )
    if (x_scales_NB is None) is (form == "fp8"):
        raise KernelError(f"grouped_gemm: row scales go with fp8 weights, this one is {form}")
    if not x_NK.is_contiguous() or not all(t.is_contiguous() for t in tensors):
        raise KernelError("grouped_gemm: rows and weights must be contiguous")
    if any(t.data_ptr() % 16 for t in (x_NK, *tensors)):
        raise KernelError("grouped_gemm: rows, weights and scales must begin at multiples of 16 bytes")
    narrow = min(t.shape[-1] * t.element_size() for t in (x_NK, tensors[0]))
    if narrow % 16:
        raise KernelError(f"grouped_gemm: a row has {narrow} bytes, which must be a multiple of 16")


def aot_cases(target: Target) -> Iterator[AotCase]:
    """See `configurations.cases`."""
    return cases(grouped_gemm_kernel, target)
