"""One product per head in Triton: what mla_decode does before and after it attends to the latents.

The tile is the same for any number of rows, so that a row's result depends on nothing beside it. D rows,
A heads, K values in, N values out.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.aot.case import AotCase


@triton.jit(do_not_specialize=("rows",))
def _per_head(
    x_ptr,
    w_ptr,
    out_ptr,
    rows,
    x_row_stride,
    x_head_stride,
    w_head_stride,
    w_stride,  # of the axis of w that is not contiguous
    out_row_stride,
    out_head_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,  # w is [A, N, K], else [A, K, N]
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out[m, a] = x[m, a] @ w[a], fp32 sums in the order of K whatever the number of rows."""
    head = tl.program_id(2)
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x_ptr + head * x_head_stride + m[:, None] * x_row_stride + k[None, :]
    w_at = w_ptr + head.to(tl.int64) * w_head_stride
    w_at += n[None, :] * w_stride + k[:, None] if K_CONTIGUOUS else k[:, None] * w_stride + n[None, :]
    sums = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        x = tl.load(x_at + first, mask=(m < rows)[:, None] & (k < K - first)[None, :], other=0.0)
        step = first if K_CONTIGUOUS else first * w_stride
        w = tl.load(w_at + step, mask=(n < N)[None, :] & (k < K - first)[:, None], other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    out_at = out_ptr + head * out_head_stride + m[:, None] * out_row_stride + n[None, :]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


def multiply_per_head(x_DAK: Tensor, w_AKN: Tensor, out_DAN: Tensor) -> None:
    """out[d, a] = x[d, a] @ w[a]; any strides, but the last of x and out is 1, and one of w's last two."""
    (D, A, K), N = x_DAK.shape, w_AKN.shape[2]
    k_contiguous = w_AKN.stride(1) == 1
    how = _tile(K, x_DAK.itemsize)
    _per_head[(triton.cdiv(D, how["BM"]), triton.cdiv(N, how["BN"]), A)](
        x_DAK,
        w_AKN,
        out_DAN,
        D,
        x_DAK.stride(0),
        x_DAK.stride(1),
        w_AKN.stride(0),
        w_AKN.stride(2 if k_contiguous else 1),
        out_DAN.stride(0),
        out_DAN.stride(1),
        K=K,
        N=N,
        K_CONTIGUOUS=k_contiguous,
        **how,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )


def _tile(k: int, itemsize: int) -> dict[str, int]:
    """64 rows even for one: the fewest that wgmma takes, and the weights take longer to read than to use.

    A short product is one turn: with two, the compiler takes the matrix instructions out of the loop.
    """
    if itemsize > 2:
        return {"BM": 16, "BN": 64, "BK": 32}
    return {"BM": 64, "BN": 128, "BK": max(16, triton.next_power_of_2(k)) if k <= 128 else 64}


def per_head_case(k: int, n: int, *, k_contiguous: bool) -> AotCase:
    """[D, k] @ [k, n] for every head, in bf16."""
    strides = (
        "x_row_stride",
        "x_head_stride",
        "w_head_stride",
        "w_stride",
        "out_row_stride",
        "out_head_stride",
    )
    pointers = ("x_ptr", "w_ptr", "out_ptr")
    return AotCase(
        operation="mla_decode",
        label=f"per head {k} to {n}",
        kernel=_per_head,
        signature={**dict.fromkeys(pointers, "*bf16"), "rows": "i32", **dict.fromkeys(strides, "i32")},
        constants={"K": k, "N": n, "K_CONTIGUOUS": k_contiguous, **_tile(k, 2)},
        aligned=frozenset({*pointers, *strides}),
        num_warps=4,
        num_stages=3,
        matrix="bf16",
        streams=True,
    )
