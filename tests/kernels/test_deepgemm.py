"""The DeepGEMM adapter against a double of the module that refuses what the library would refuse."""

import sys
from types import ModuleType

import pytest
import torch

from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.grouped_gemm import deepgemm, formats, reference
from moe_runtime.kernels.quantize_fp8_block.reference import quantize_fp8_block

NEW = (
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "get_mn_major_tma_aligned_tensor",
)
OLD = (
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    "get_col_major_tma_aligned_tensor",
)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def align(scales):
    """Columns of the rows axis contiguous, at multiples of 16 bytes, groups one after another."""
    *lead, rows, blocks = scales.shape
    out = torch.empty(*lead, blocks, -(-rows // 4) * 4)[..., :rows].transpose(-1, -2)
    return out.copy_(scales)


def check_operand(operand, dtype):
    values, scales = operand if isinstance(operand, tuple) else (operand, None)
    assert values.dtype == dtype
    assert values.is_contiguous()
    if dtype == torch.float8_e4m3fn:
        assert scales.dtype == torch.float32
    return values, scales


def check_rows(a, d, dtype):
    values, scales = check_operand(a, dtype)
    assert d.dtype == torch.bfloat16
    assert d.is_contiguous()
    if scales is not None:
        rows, blocks = scales.shape[-2:]
        assert (rows, blocks) == (values.shape[-2], -(-values.shape[-1] // 128))
        stride = -(-rows // 4) * 4
        assert scales.stride()[-2:] == (1, stride)
        assert scales.dim() == 2 or scales.stride(0) == blocks * stride
    return values, scales


def product(values, scales, weight):
    return reference.grouped_gemm(
        values,
        weight,
        torch.tensor([0]),
        torch.tensor([len(values)]),
        x_scales_NB=scales,
        out_dtype=torch.bfloat16,
    )


class Double:
    """Computes as the library does: blocks of 128 rows of the group of their first row, or masked rows."""

    def __init__(self, dtype=torch.float8_e4m3fn):
        self.dtype, self.expected, self.calls = dtype, None, 0

    def weights(self, b):
        values, scales = check_operand(b, self.dtype)
        if scales is None:
            return values
        G, O, K = values.shape
        assert scales.shape == (G, -(-O // 128), -(-K // 128))
        assert scales.is_contiguous()
        return formats.Fp8Block(values, scales)

    def contiguous(self, a, b, d, grouped_layout, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
        values, scales = check_rows(a, d, self.dtype)
        weight = self.weights(b)
        assert grouped_layout.dtype == torch.int32
        assert grouped_layout.shape == (len(values),)
        assert len(values) % 128 == 0
        for block, groups in enumerate(grouped_layout.view(-1, 128)):
            owners = set(groups.tolist()) - {-1}
            assert len(owners) <= 1, "a block of two groups"
            assert groups[0] >= 0 or not owners, "a group starts within a block"
            if owners:
                rows = slice(128 * block, 128 * block + 128)
                part = None if scales is None else scales[rows]
                d[rows] = product(values[rows], part, formats.of_slot(weight, owners.pop()))
        self.calls += 1

    def masked(self, a, b, d, masked_m, expected_m, recipe=None, compiled_dims="nk"):
        values, scales = check_rows(a, d, self.dtype)
        weight = self.weights(b)
        assert masked_m.dtype == torch.int32
        assert masked_m.shape == values.shape[:1]
        for group, count in enumerate(masked_m.tolist()):
            part = None if scales is None else scales[group, :count]
            d[group, :count] = product(values[group, :count], part, formats.of_slot(weight, group))
        self.expected = expected_m
        self.calls += 1


def install(monkeypatch, names, double, **more):
    module = ModuleType("deep_gemm")
    for name, function in zip(names, (double.contiguous, double.masked, align), strict=True):
        setattr(module, name, function)
    for name, function in more.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return deepgemm.load()


def grouped_rows(inputs, dtype=None):
    """Groups of 130, 0 and 5 rows at multiples of 128, gap rows zero."""
    starts = torch.tensor([0, 256, 256], dtype=torch.int32)
    counts = torch.tensor([130, 0, 5], dtype=torch.int32)
    x = randn(384, inputs, seed=1)
    x[130:256] = x[261:] = 0
    return (x if dtype is None else x.to(dtype)), starts, counts


@pytest.mark.parametrize("names", [NEW, OLD])
def test_grouped_rows(monkeypatch, names):
    library = install(monkeypatch, names, Double())
    weight = formats.encode_fp8(randn(3, 160, 320, seed=2))
    x, starts, counts = grouped_rows(320)
    values, scales = quantize_fp8_block(x)
    row_weights = randn(384, seed=3)
    row_weights[130:256] = row_weights[261:] = torch.nan  # of no row
    for given in (scales, scales.contiguous()):  # as quantised here, and row by row
        got = library.grouped_gemm(values, weight, starts, counts, x_scales_NB=given)
        want = reference.grouped_gemm(values, weight, starts, counts, x_scales_NB=given)
        assert torch.equal(got, want)
        weighted = library.grouped_gemm(
            values, weight, starts, counts, x_scales_NB=given, row_weights_N=row_weights
        )
        wanted = (want.float() * row_weights.nan_to_num()[:, None]).bfloat16()
        torch.testing.assert_close(weighted, wanted)


@pytest.mark.parametrize("names", [NEW, OLD])
def test_masked_rows(monkeypatch, names):
    double = Double()
    library = install(monkeypatch, names, double)
    weight = formats.encode_fp8(randn(3, 160, 320, seed=2))
    counts = torch.tensor([0, 5, 6], dtype=torch.int32)
    starts = torch.tensor([0, 6, 12], dtype=torch.int32)
    values, scales = quantize_fp8_block(randn(18, 320, seed=1))
    valid = (torch.arange(6) < counts[:, None]).flatten()
    for hint, expected in ((None, 6), (2, 2)):
        got = library.grouped_gemm(
            values, weight, starts, counts, x_scales_NB=scales, rows_per_slot=hint, masked=True
        )
        want = reference.grouped_gemm(values, weight, starts, counts, x_scales_NB=scales)
        assert torch.equal(got[valid], want[valid])
        assert double.expected == expected


def test_bf16_weights(monkeypatch):
    double = Double(torch.bfloat16)
    more = {"m_grouped_bf16_gemm_nt_contiguous": double.contiguous}
    library = install(monkeypatch, NEW, Double(), **more)
    weight = randn(3, 160, 320, seed=2).bfloat16()
    arguments = grouped_rows(320, torch.bfloat16)
    got = library.grouped_gemm(arguments[0], weight, *arguments[1:])
    assert torch.equal(got, reference.grouped_gemm(arguments[0], weight, *arguments[1:]))
    assert double.calls == 1
    with pytest.raises(KernelError, match="no grouped bf16"):
        library.grouped_gemm(arguments[0], weight, *arguments[1:], masked=True)


def test_no_rows(monkeypatch):
    double = Double()
    library = install(monkeypatch, NEW, double)
    nothing = torch.zeros(3, dtype=torch.int32)
    values, scales = quantize_fp8_block(randn(0, 320))
    weight = formats.encode_fp8(randn(3, 160, 320))
    got = library.grouped_gemm(values, weight, nothing, nothing, x_scales_NB=scales)
    assert got.shape == (0, 160)
    assert not double.calls


def test_what_the_library_does_not_take(monkeypatch):
    library = install(monkeypatch, NEW, Double())
    weight = formats.encode_fp8(randn(3, 160, 320))
    x, starts, counts = grouped_rows(320)
    values, scales = quantize_fp8_block(x)
    for rows, w, s, match in (
        (values, weight, None, "with scales"),
        (x, weight, scales, "float8_e4m3fn"),
        (values, weight, scales[:, :2], r"\[384, 3\]"),
        (values[:200], weight, scales[:200], "multiple of 128"),
        (x, randn(3, 160, 320), None, "Fp8Block"),
    ):
        with pytest.raises(KernelError, match=match):
            library.grouped_gemm(rows, w, starts, counts, x_scales_NB=s)


def test_absent_old_or_changed_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(KernelError, match="pip install"):
        deepgemm.load()
    module = ModuleType("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    with pytest.raises(KernelError, match="has no m_grouped_fp8_gemm_nt_contiguous or m_grouped_gemm"):
        deepgemm.load()
    with pytest.raises(KernelError, match="takes other arguments"):
        install(monkeypatch, NEW, type("Other", (), {"contiguous": lambda a, b: None, "masked": print})())
    library = install(monkeypatch, NEW, Double(), get_mk_alignment_for_contiguous_layout=lambda: 256)
    assert library.alignment == 256
