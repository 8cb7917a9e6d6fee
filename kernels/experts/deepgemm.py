"""experts by DeepGEMM, with the activation and quantisation of this project: see `grouped_gemm.deepgemm`.

N rows, s local slots, H hidden, I intermediate, B blocks of 128 of a row.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from moe_runtime.kernels.aot.case import SM_100
from moe_runtime.kernels.chip import chip_of
from moe_runtime.kernels.experts.steps import Steps, run
from moe_runtime.kernels.grouped_gemm import deepgemm
from moe_runtime.kernels.grouped_gemm.formats import Weight
from moe_runtime.kernels.quantize_fp8_block.triton import quantize_fp8_block
from moe_runtime.kernels.silu_mul.triton import silu_mul
from moe_runtime.kernels.silu_mul_quantize.triton import silu_mul_quantize


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts on the installed library; made by `load`."""

    library: deepgemm.DeepGemm

    def experts(
        self,
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
        """As the reference, in bf16. LOCAL; the host does not wait.

        Grouped rows: every group starts at a multiple of the library's alignment, gap rows are zero.
        On sm_100, where the library takes scales that are powers of two, rows are quantised so, and
        the scales of weights and of rows that come quantised have to be.
        """
        power_of_two = chip_of(x_NH).target is SM_100
        steps = Steps(
            grouped_gemm=partial(self.library.grouped_gemm, masked=masked),
            silu_mul=silu_mul,
            silu_mul_quantize=partial(silu_mul_quantize, power_of_two=power_of_two),
            quantize_fp8_block=partial(quantize_fp8_block, power_of_two=power_of_two),
        )
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


def load() -> Experts:
    """KernelError if the library is absent or lacks what is called."""
    return Experts(deepgemm.load())
