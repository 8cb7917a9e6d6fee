"""experts on a GPU: two grouped products with the activation between them, launched without waiting.

N rows, s local slots, H hidden, I intermediate, B blocks of 128 of a row.
"""

from collections.abc import Iterator

from torch import Tensor

from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.experts.steps import Steps, run
from moe_runtime.kernels.grouped_gemm.formats import Weight
from moe_runtime.kernels.grouped_gemm.triton import grouped_gemm
from moe_runtime.kernels.quantize_fp8_block.triton import quantize_fp8_block
from moe_runtime.kernels.silu_mul.triton import silu_mul
from moe_runtime.kernels.silu_mul_quantize.triton import silu_mul_quantize

# Rows a slot is expected to have if masked rows come without a hint: up to here the weights, not the
# products, take the time, so too large a tile costs little.
_MASKED_ROWS = 64


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
    """As the reference, up to the order of sums and the rounding of exp. LOCAL; the host does not wait."""
    if masked and rows_per_slot is None:
        rows_per_slot = min(_MASKED_ROWS, x_NH.shape[0] // max(1, len(counts_s)))
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


def aot_cases(target: Target) -> Iterator[AotCase]:
    """None: every kernel belongs to another operation, which lists it."""
    del target
    yield from ()
