"""grouped_gemm: rows grouped by slot, each group times its slot's weight.

N rows, s slots, O outputs, K inputs, B blocks of 128 inputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels.grouped_gemm.formats import FP8_BLOCK, Weight, decode, of_slot, outputs


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
    """[N, O]: row n of slot i, starts[i] <= n < starts[i] + counts[i], times weight[i] transposed.

    Both row layouts: grouped rows as they lie; masked rows [s, capacity, K] seen as [s * capacity, K],
    with starts 0, capacity, 2 capacity, ... Starts int32 ascend from 0, groups do not overlap.
    x_scales      fp32 [N, B] of any strides, with x in e4m3 and an `Fp8Block` weight only
    row_weights   fp32 [N]: each row is multiplied on its way out, before it is rounded
    zero_gaps     rows in no group come out as zero; otherwise they may hold anything
    out_dtype     x's dtype, or bf16 for x in e4m3
    rows_per_slot a hint, how many rows to expect in a group; it may change the rounding (a caller whose
                  results must not depend on the batch gives a constant), and is meant for a device
    Sums are in fp32.
    """
    del zero_gaps, rows_per_slot
    wide_NK = widen(x_NK, x_scales_NB)
    y_NO = wide_NK.new_zeros(x_NK.shape[0], outputs(weight_sOK))
    for slot, (start, count) in enumerate(zip(starts_s.tolist(), counts_s.tolist(), strict=True)):
        if not count:
            continue
        rows = slice(start, start + count)
        y_NO[rows] = F.linear(wide_NK[rows], decode(of_slot(weight_sOK, slot))[0].float())
        if row_weights_N is not None:
            y_NO[rows] *= row_weights_N[rows, None]
    return y_NO.to(out_dtype or result_dtype(x_NK))


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product of x unless another is asked for."""
    return torch.bfloat16 if x.element_size() == 1 else x.dtype


def widen(x_NK: Tensor, scales_NB: Tensor | None) -> Tensor:
    """fp32 [N, K]: the values of rows that may be scaled by blocks."""
    if scales_NB is None:
        return x_NK.float()
    return x_NK.float() * scales_NB.repeat_interleave(FP8_BLOCK, 1)[:, : x_NK.shape[1]]
