"""The gated MLPs of a rank's slots in steps, whatever functions carry them out: product, activation, product.

With fp8 weights, rows that are not quantised yet are, by blocks of 128; so is the activation as it is made.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from moe_runtime.kernels.grouped_gemm.formats import Fp8Block, Weight

Step = Callable[..., Any]


class Steps(NamedTuple):
    """Operations of those names, all for one device."""

    grouped_gemm: Step
    silu_mul: Step
    silu_mul_quantize: Step
    quantize_fp8_block: Step


def run(
    steps: Steps,
    x_NH: Tensor,
    starts_s: Tensor,
    counts_s: Tensor,
    gate_up_s2IH: Weight,
    down_sHI: Weight,
    weights_N: Tensor | None,
    *,
    x_scales_NB: Tensor | None,
    masked: bool,
    rows_per_slot: int | None,
) -> Tensor:
    """See `experts`."""
    layout = {"starts_s": starts_s, "counts_s": counts_s, "rows_per_slot": rows_per_slot}
    counts = counts_s if masked else None
    if isinstance(gate_up_s2IH, Fp8Block) and x_scales_NB is None:
        dtype = gate_up_s2IH.values.dtype
        x_NH, x_scales_NB = steps.quantize_fp8_block(x_NH, dtype=dtype, counts_s=counts)
    gate_up_N2I = steps.grouped_gemm(x_NH, gate_up_s2IH, x_scales_NB=x_scales_NB, zero_gaps=False, **layout)
    gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
    scales_NB = None
    if isinstance(down_sHI, Fp8Block):
        dtype = down_sHI.values.dtype
        h_NI, scales_NB = steps.silu_mul_quantize(gate_NI, up_NI, dtype=dtype, counts_s=counts)
    else:
        h_NI = steps.silu_mul(gate_NI, up_NI, counts_s=counts)
    y_NH: Tensor = steps.grouped_gemm(
        h_NI, down_sHI, x_scales_NB=scales_NB, row_weights_N=weights_N, zero_gaps=not masked, **layout
    )
    return y_NH
