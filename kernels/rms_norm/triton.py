"""rms_norm on a GPU: rows of the last axis, each read once; short rows several to a program.

Rows n of an [..., A, D] view: t = n // A, a = n % A, so that heads of a wider product need no copy.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target

VALUES = 4096  # per program, unless one row has more


@triton.jit
def normalized(x, weight, D, eps, dtype: tl.constexpr):
    """fp32: rows of x (fp32, zeros past D) normalised, rounded to `dtype`, and times the weight."""
    mean = tl.div_rn(tl.sum(x * x, 1), D * 1.0)
    scaled = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    return scaled.to(dtype).to(tl.float32) * weight[None, :]


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    N,
    D,
    A,
    x_stride,
    x_inner_stride,
    residual_stride,
    residual_inner_stride,
    out_stride,
    out_inner_stride,
    eps,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outer, inner = (row // A)[:, None], (row % A)[:, None]
    column = tl.arange(0, COLUMNS)
    inside = (row < N)[:, None] & (column < D)[None, :]
    at = outer * x_stride + inner * x_inner_stride + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if RESIDUAL:
        place = outer * residual_stride + inner * residual_inner_stride + column[None, :]
        x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    y = normalized(x, weight, D, eps, dtype)
    to = outer * out_stride + inner * out_inner_stride + column[None, :]
    tl.store(out_ptr + to, y.to(dtype), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As the reference, up to the rounding of the mean (relative 1e-6). LOCAL."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    rows, A, x_strides = _rows(x)
    _, _, out_strides = _rows(result)
    _, _, residual_strides = _rows(result if residual is None else residual)
    D = x.shape[-1]
    tile = tile_shape(D)
    _rms_norm[(triton.cdiv(rows, tile[0]),)](
        x,
        result if residual is None else residual,
        weight.contiguous(),
        result,
        rows,
        D,
        A,
        *x_strides,
        *residual_strides,
        *out_strides,
        eps,
        RESIDUAL=residual is not None,
        ROWS=tile[0],
        COLUMNS=tile[1],
        num_warps=warps(tile),
        enable_fp_fusion=False,
    )
    return result


def tile_shape(D: int) -> tuple[int, int]:
    """Rows and columns per program."""
    columns = triton.next_power_of_2(D)
    return max(1, VALUES // columns), columns


def warps(tile: tuple[int, int]) -> int:
    """Eight or more values per thread."""
    return 8 if tile[0] * tile[1] > VALUES else 4


def _rows(x: Tensor) -> tuple[int, int, tuple[int, int]]:
    """Number of rows, rows per step of the outer stride, and both strides. Last axis contiguous."""
    assert x.stride(-1) == 1
    if x.dim() == 1:
        x = x[None]
    if x.dim() == 2:
        return x.shape[0], 1, (x.stride(0), 0)
    outer = x.flatten(0, -3)  # a view, or all of it would be written to a copy
    assert outer.data_ptr() == x.data_ptr()
    return outer.shape[0] * outer.shape[1], outer.shape[1], (outer.stride(0), outer.stride(1))


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Hidden states with and without a residual, latents, and heads, of every model."""
    widths = {m.hidden: True for m in shapes.MODELS}
    widths |= {m.latent_rank: False for m in shapes.MODELS if m.latent_rank}
    widths |= {m.head_dim: False for m in shapes.MODELS if m.head_dim}
    strides = [f"{name}_{kind}stride" for name in ("x", "residual", "out") for kind in ("", "inner_")]
    for width, may_add in widths.items():
        for residual in (False, True)[: 1 + may_add]:
            tile = tile_shape(width)
            yield AotCase(
                operation="rms_norm",
                label=f"{width}{' + residual' * residual}",
                kernel=_rms_norm,
                signature={
                    **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16"),
                    **dict.fromkeys(("N", "D", "A", *strides), "i32"),
                    "eps": "fp32",
                },
                constants={"RESIDUAL": residual, "ROWS": tile[0], "COLUMNS": tile[1]},
                aligned=frozenset({"x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "D", *strides}),
                num_warps=warps(tile),
                fp_fusion=False,
                streams=True,
                representative=target.name == "sm_90" and width == shapes.DEEPSEEK_V3.hidden and residual,
            )
