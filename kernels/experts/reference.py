"""experts: the gated MLPs of a rank's slots over rows grouped by slot.

N rows, s local slots, H hidden, I intermediate, B blocks of 128 of a row.
"""

from torch import Tensor

from moe_runtime.kernels.experts.steps import Steps, run
from moe_runtime.kernels.grouped_gemm.formats import Weight
from moe_runtime.kernels.grouped_gemm.reference import grouped_gemm
from moe_runtime.kernels.quantize_fp8_block.reference import quantize_fp8_block
from moe_runtime.kernels.silu_mul.reference import silu_mul
from moe_runtime.kernels.silu_mul_quantize.reference import silu_mul_quantize


def experts(
    x_NH: Tensor,
    starts_s: Tensor,
    counts_s: Tensor,
    gate_up_s2IH: Weight,
    down_sHI: Weight,
    weights_N: Tensor | None = None,
    *,
    x_scales_NB: Tensor | None = None,
    masked: bool = False,
    rows_per_slot: int | None = None,
) -> Tensor:
    """[N, H]: row n of slot i, starts[i] <= n < starts[i] + counts[i], through that slot's MLP.

    Rows in no slot come out as zero. `weights` fp32: multiply each row (in fp32) on its way out.
    masked        the rows are [s, capacity] of equal capacity seen as one axis; those in no slot hold
                  anything, and may come out as anything
    x_scales      fp32: the rows are e4m3 with a scale per 128 values, the weights `Fp8Block`
    rows_per_slot a hint for devices, see `grouped_gemm`
    """
    steps = Steps(grouped_gemm, silu_mul, silu_mul_quantize, quantize_fp8_block)
    return run(
        steps,
        x_NH,
        starts_s,
        counts_s,
        gate_up_s2IH,
        down_sHI,
        weights_N,
        x_scales_NB=x_scales_NB,
        masked=masked,
        rows_per_slot=rows_per_slot,
    )
