"""grouped_gemm by DeepGEMM, where that library is installed (sm_90, sm_100): optional, lazily imported.

Fp8Block weights and, if the installed version has them, plain bf16 ones. It cannot run without such
a GPU; the tests check, with a double of the module, what is passed to it: names, dtypes, shapes,
alignment and the layout of scales, as deep_gemm 2.6.1 and the names of early 2025 want them.

Grouped rows become its contiguous layout: N a multiple of the alignment (128), every group starts at
one, `grouped_layout` int32 [N] names each row's group and is -1 in gaps. Masked rows become its
masked layout, with the counts on the device. On sm_100 scales have to be powers of two.
N rows, K inputs, O outputs, s slots, B blocks of 128 inputs.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.grouped_gemm.formats import FP8_BLOCK, Fp8Block, Weight, outputs

INSTALL = "pip install git+https://github.com/deepseek-ai/DeepGEMM"
ALIGNMENT = 128  # of a group's first row, unless the library says otherwise
# Operation -> its names, newest first, and how many arguments are passed by position.
_NAMES = {
    "fp8_contiguous": (("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous"), 4),
    "fp8_masked": (("m_grouped_fp8_gemm_nt_masked", "m_grouped_gemm_fp8_fp8_bf16_nt_masked"), 5),
    "bf16_contiguous": (("m_grouped_bf16_gemm_nt_contiguous",), 4),
    "bf16_masked": (("m_grouped_bf16_gemm_nt_masked",), 5),
    "align_scales": (("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor"), 1),
}
_OPTIONAL = ("bf16_contiguous", "bf16_masked")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepGemm:
    """The library's functions that were found; made by `load`."""

    fp8_contiguous: Callable[..., Any]
    fp8_masked: Callable[..., Any]
    bf16_contiguous: Callable[..., Any] | None
    bf16_masked: Callable[..., Any] | None
    align_scales: Callable[..., Tensor]
    alignment: int

    def grouped_gemm(
        self,
        x_NK: Tensor,
        weight_sOK: Weight,
        starts_s: Tensor,
        counts_s: Tensor,
        *,
        x_scales_NB: Tensor | None = None,
        row_weights_N: Tensor | None = None,
        zero_gaps: bool = True,
        rows_per_slot: int | None = None,
        masked: bool = False,
    ) -> Tensor:
        """As the reference, in bf16; `masked` says that the rows are [s, capacity] seen as one axis.

        The host waits for nothing, so the alignment of `starts` is the caller's duty. Gap rows of x
        have to be zero. Row weights are multiplied after the product was rounded. KernelError for
        what the library does not take.
        """
        self._check(x_NK, weight_sOK, x_scales_NB, masked=masked)
        (N, K), num_outputs = x_NK.shape, outputs(weight_sOK)
        s, fp8 = len(counts_s), isinstance(weight_sOK, Fp8Block)
        y_NO = x_NK.new_empty(N, num_outputs, dtype=torch.bfloat16)
        if not N:
            return y_NO
        lead = (s, N // s) if masked else (N,)
        rows: Any = x_NK.view(*lead, K)
        if x_scales_NB is not None:
            rows = (rows, self._scales(x_scales_NB.view(*lead, -1)))
        weight: Any = tuple(weight_sOK) if isinstance(weight_sOK, Fp8Block) else weight_sOK
        y = y_NO.view(*lead, num_outputs)
        if masked:
            expected = N // s if rows_per_slot is None else rows_per_slot
            run = self.fp8_masked if fp8 else self.bf16_masked
            assert run is not None
            run(rows, weight, y, counts_s, expected)
        else:
            run = self.fp8_contiguous if fp8 else self.bf16_contiguous
            assert run is not None
            if zero_gaps:
                y_NO.zero_()  # whole blocks of gap rows are not computed
            layout_N = _layout(starts_s, counts_s, N)
            run(rows, weight, y, layout_N)
            if row_weights_N is not None:  # those of gap rows may be anything
                row_weights_N = torch.where(layout_N < 0, 0.0, row_weights_N)
        return y_NO if row_weights_N is None else (y_NO.float() * row_weights_N[:, None]).bfloat16()

    def _scales(self, scales: Tensor) -> Tensor:
        """[..., N, B]: column by column, columns at multiples of 16 bytes, groups one after another."""
        rows, blocks = scales.shape[-2:]
        stride = -(-rows // 4) * 4
        wanted = (1, stride) if scales.dim() == 2 else (blocks * stride, 1, stride)
        return scales if scales.stride() == wanted else self.align_scales(scales)

    def _check(self, x_NK: Tensor, weight_sOK: Weight, x_scales_NB: Tensor | None, *, masked: bool) -> None:
        if isinstance(weight_sOK, Fp8Block):
            if x_NK.dtype is not torch.float8_e4m3fn or x_scales_NB is None:
                raise KernelError(
                    f"deep_gemm: fp8 weights take float8_e4m3fn rows with scales, not {x_NK.dtype}"
                )
            blocks = -(-x_NK.shape[1] // FP8_BLOCK)
            if x_scales_NB.dtype is not torch.float32 or x_scales_NB.shape != (len(x_NK), blocks):
                raise KernelError(f"deep_gemm: row scales must be float32 [{len(x_NK)}, {blocks}]")
        elif isinstance(weight_sOK, Tensor) and weight_sOK.dtype is x_NK.dtype is torch.bfloat16:
            if (self.bf16_masked if masked else self.bf16_contiguous) is None:
                raise KernelError("deep_gemm: the installed version has no grouped bf16 product")
        else:
            raise KernelError("deep_gemm: weights must be Fp8Block, or bf16 with bf16 rows")
        if not masked and len(x_NK) % self.alignment:
            raise KernelError(
                f"deep_gemm: {len(x_NK)} grouped rows; their number must be a multiple of {self.alignment}"
            )


def load() -> DeepGemm:
    """The installed library. KernelError if it is absent, lacks a function or takes other arguments."""
    try:
        module = import_module("deep_gemm")
    except ImportError as error:
        raise KernelError(f"deep_gemm cannot be imported ({error}); install it with: {INSTALL}") from error
    found: dict[str, Any] = {name: _find(module, *wanted) for name, wanted in _NAMES.items()}
    missing = [name for name, function in found.items() if function is None and name not in _OPTIONAL]
    if missing:
        names = ", ".join(" or ".join(_NAMES[name][0]) for name in missing)
        raise KernelError(f"this deep_gemm has no {names}")
    alignment = getattr(
        module,
        "get_mk_alignment_for_contiguous_layout",
        getattr(module, "get_m_alignment_for_contiguous_layout", None),
    )
    return DeepGemm(**found, alignment=alignment() if alignment else ALIGNMENT)


def _find(module: Any, names: tuple[str, ...], positional: int) -> Callable[..., Any] | None:
    """The first of the functions that exists; KernelError if it cannot be called as it is here."""
    function: Callable[..., Any] | None = next(
        (getattr(module, name) for name in names if hasattr(module, name)), None
    )
    if function is None:
        return None
    try:
        inspect.signature(function).bind(*range(positional))
    except ValueError:  # a compiled function that does not tell
        return function
    except TypeError as error:
        raise KernelError(f"deep_gemm.{function.__name__} takes other arguments: {error}") from error
    return function


def _layout(starts_s: Tensor, counts_s: Tensor, num_rows: int) -> Tensor:
    """int32 [num_rows]: the slot of each row, -1 for gap rows."""
    rows_N = torch.arange(num_rows, dtype=torch.int32, device=starts_s.device)
    # Empty slots share the start of the next one, which is the last of equals.
    slots_N = torch.searchsorted(starts_s, rows_N, right=True, out_int32=True) - 1
    ends_N = (starts_s + counts_s)[slots_N]
    return torch.where(rows_N < ends_N, slots_N, -1)
