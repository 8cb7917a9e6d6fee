"""rope on a GPU, in place; `rotated` is the device function that other kernels rotate with.

T rows, A heads, D rotated values of a head.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target

HEADS = 16  # at most, per program


@triton.jit
def rotated(
    x_ptr, heads_at, head_is, cos_sin_ptr, D: tl.constexpr, DP: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Rotated values, fp32 [heads, DP], and their columns [DP]; columns from D on are not real.

    `heads_at` int64 [heads]: where each head's values begin; `head_is` [heads]: whether there is one.
    `cos_sin_ptr`: the table's row.
    """
    half = tl.arange(0, DP // 2)
    real = head_is[:, None] & (half < D // 2)[None, :]
    if INTERLEAVED:
        column = tl.arange(0, DP)
        inside = head_is[:, None] & (column < D)[None, :]
        x = tl.load(x_ptr + heads_at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], DP // 2, 2)))
        turn = tl.load(cos_sin_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        cos, sin = tl.split(tl.reshape(turn, (DP // 2, 2)))
    else:
        at = heads_at[:, None] + half[None, :]
        a = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + at + D // 2, mask=real, other=0.0).to(tl.float32)
        cos = tl.load(cos_sin_ptr + half, mask=half < D // 2, other=0.0).to(tl.float32)
        sin = tl.load(cos_sin_ptr + D // 2 + half, mask=half < D // 2, other=0.0).to(tl.float32)
    return a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]


@triton.jit
def store_rotated(
    first,
    second,
    out_ptr,
    heads_at,
    head_is,
    D: tl.constexpr,
    DP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Store what `rotated` gave: pairs side by side, or the halves apart."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, DP)
        both = tl.reshape(tl.join(first, second), (first.shape[0], DP)).to(dtype)
        inside = head_is[:, None] & (column < D)[None, :]
        tl.store(out_ptr + heads_at[:, None] + column[None, :], both, mask=inside)
    else:
        half = tl.arange(0, DP // 2)
        at = heads_at[:, None] + half[None, :]
        real = head_is[:, None] & (half < D // 2)[None, :]
        tl.store(out_ptr + at, first.to(dtype), mask=real)
        tl.store(out_ptr + at + D // 2, second.to(dtype), mask=real)


@triton.jit
def _rope(
    x_ptr,
    cos_sin_ptr,
    A,
    x_stride,
    head_stride,
    table_stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = token * x_stride + head.to(tl.int64) * head_stride
    first, second = rotated(x_ptr, at, head < A, cos_sin_ptr + token * table_stride, D, DP, INTERLEAVED)
    store_rotated(first, second, x_ptr, at, head < A, D, DP, INTERLEAVED)


def rope(x_TAD: Tensor, cos_sin_TD: Tensor, *, interleaved: bool) -> None:
    """As the reference, bit for bit: no product is fused with its sum. LOCAL."""
    T, A, D = x_TAD.shape
    assert x_TAD.stride(2) == 1
    heads = heads_per_program(A)
    _rope[(T, triton.cdiv(A, heads))](
        x_TAD,
        cos_sin_TD,
        A,
        x_TAD.stride(0),
        x_TAD.stride(1),
        cos_sin_TD.stride(0),
        D=D,
        DP=triton.next_power_of_2(D),
        INTERLEAVED=interleaved,
        HEADS=heads,
        num_warps=1,
        enable_fp_fusion=False,
    )


def heads_per_program(heads: int) -> int:
    """A power of two, so that a warp has at least a full load for each of its threads."""
    return min(int(triton.next_power_of_2(heads)), HEADS)


def aot_cases(target: Target) -> Iterator[AotCase]:
    """MLA's rotated parts and whole GQA heads, both ways to pair, one head and many."""
    widths = {m.rope_dim or m.head_dim: m.rope_dim > 0 for m in shapes.MODELS}
    for width, interleaved in widths.items():
        for heads in (1, HEADS):
            yield AotCase(
                operation="rope",
                label=f"{heads} x {width} {'interleaved' if interleaved else 'halves'}",
                kernel=_rope,
                signature={
                    "x_ptr": "*bf16",
                    "cos_sin_ptr": "*fp32",
                    **dict.fromkeys(("A", "x_stride", "head_stride", "table_stride"), "i32"),
                },
                constants={"D": width, "DP": width, "INTERLEAVED": interleaved, "HEADS": heads},
                aligned=frozenset({"x_ptr", "cos_sin_ptr", "x_stride", "head_stride", "table_stride"}),
                num_warps=1,
                fp_fusion=False,
                streams=heads > 1,  # one head is less than a load for every thread
                representative=target.name == "gfx942" and interleaved and heads == HEADS,
            )
