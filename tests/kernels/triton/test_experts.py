"""experts on a GPU, its kernels interpreted, against the reference that quantises alike."""

from typing import Any

import pytest
import torch

from moe_runtime.kernels.experts import reference
from moe_runtime.kernels.grouped_gemm import formats
from moe_runtime.kernels.quantize_fp8_block.reference import quantize_fp8_block
from tests.kernels.interpreter import interpreted
from tests.kernels.test_deepgemm import NEW, Double, install
from tests.kernels.triton.cases import normal, poisoned, relative_error

assert interpreted("grouped_gemm")  # before anything imports the kernels for compilation
from moe_runtime.kernels.experts import deepgemm  # noqa: E402
from moe_runtime.kernels.experts import triton as kernel  # noqa: E402
from moe_runtime.kernels.gated_mlp import reference as mlp_reference  # noqa: E402
from moe_runtime.kernels.gated_mlp import triton as mlp_kernel  # noqa: E402

HIDDEN, INTER, SLOTS = 128, 160, 3
# With the format, the bound: two bf16 roundings between the products; an fp8 code that rounds the other
# way because exp did is 1/16 of one of 160 terms.
FORMATS: dict[str, tuple[Any, torch.dtype, float]] = {
    "fp32": (lambda w: w, torch.float32, 2e-6),
    "bf16": (lambda w: w.bfloat16(), torch.bfloat16, 8e-3),
    "fp8": (formats.encode_fp8, torch.bfloat16, 1.2e-2),
    "mxfp4": (formats.encode_mxfp4, torch.bfloat16, 8e-3),
    "int4": (formats.encode_int4, torch.bfloat16, 8e-3),
}


def weights(encode):
    gate_up = normal(SLOTS, 2 * INTER, HIDDEN, seed=1) / HIDDEN**0.5
    down = normal(SLOTS, HIDDEN, INTER, seed=2) / INTER**0.5
    return encode(gate_up), encode(down)


@pytest.mark.filterwarnings("ignore:All-NaN")  # gap rows between the products hold what memory held
@pytest.mark.parametrize("name", FORMATS)
def test_grouped_rows(name):
    encode, dtype, tolerance = FORMATS[name]
    counts = torch.tensor([5, 0, 9], dtype=torch.int32)
    starts = torch.tensor([0, 8, 8], dtype=torch.int32)
    x, row_weights = normal(20, HIDDEN, seed=3).to(dtype), normal(20, seed=4)
    for extra in ((), (row_weights,)):
        arguments = (x, starts, counts, *weights(encode), *extra)
        want = reference.experts(*arguments)
        with poisoned():
            got = kernel.experts(*arguments)
        assert got.dtype == dtype
        assert relative_error(got.float(), want.float()) <= tolerance
        assert not got[5:8].any()
        assert not got[17:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_masked_rows(name):
    encode, dtype, tolerance = FORMATS[name]
    counts = torch.tensor([0, 6, 2], dtype=torch.int32)
    starts = torch.tensor([0, 6, 12], dtype=torch.int32)
    x = normal(18, HIDDEN, seed=3).to(dtype)
    valid = (torch.arange(6) < counts[:, None]).flatten()
    x[~valid] = torch.nan
    arguments = (x, starts, counts, *weights(encode))
    want = reference.experts(*arguments, masked=True)
    with poisoned():
        got = kernel.experts(*arguments, masked=True)
    assert relative_error(got[valid].float(), want[valid].float()) <= tolerance


def test_rows_that_come_quantised():
    """As a dispatch in fp8 delivers them: the same as quantising here."""
    gate_up, down = weights(formats.encode_fp8)
    counts = torch.tensor([3, 0, 4], dtype=torch.int32)
    starts = torch.tensor([0, 3, 3], dtype=torch.int32)
    x = normal(7, HIDDEN, seed=3).bfloat16()
    values, scales = quantize_fp8_block(x)
    arguments = (starts, counts, gate_up, down)
    got = kernel.experts(values, *arguments, x_scales_NB=scales.contiguous())
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, kernel.experts(x, *arguments))


def test_no_rows_at_all():
    nothing = torch.zeros(SLOTS, dtype=torch.int32)
    for encode, dtype, _ in FORMATS.values():
        x = normal(0, HIDDEN).to(dtype)
        assert kernel.experts(x, nothing, nothing, *weights(encode)).shape == (0, HIDDEN)


def test_on_deepgemm(monkeypatch):
    """Aligned and masked rows, e4m3, on the double of the library."""
    install(monkeypatch, NEW, Double())
    experts = deepgemm.load().experts
    starts, counts = (torch.tensor(v, dtype=torch.int32) for v in ([0, 128, 128], [5, 0, 9]))
    x = torch.zeros(256, HIDDEN, dtype=torch.bfloat16)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        x[start : start + count] = normal(count, HIDDEN, seed=count).bfloat16()
    tolerance = FORMATS["fp8"][2]
    arguments = (x, starts, counts, *weights(formats.encode_fp8), normal(256, seed=4))
    got = experts(*arguments)
    want = reference.experts(*arguments)
    assert relative_error(got.float(), want.float()) <= tolerance
    assert not got[5:128].any()
    starts = torch.tensor([0, 6, 12], dtype=torch.int32)
    counts = torch.tensor([0, 6, 2], dtype=torch.int32)
    valid = (torch.arange(6) < counts[:, None]).flatten()
    masked = (x[:18], starts, counts, *weights(formats.encode_fp8))
    got, want = experts(*masked, masked=True), reference.experts(*masked, masked=True)
    assert relative_error(got[valid].float(), want[valid].float()) <= tolerance


def test_gated_mlp():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
        gate_up, down = (normal(*shape, seed=1).to(dtype) / 8 for shape in ((160, 96), (96, 80)))
        for rows in (0, 1, 7):
            x, residual = normal(rows, 96, seed=2).to(dtype), normal(rows, 96, seed=3).to(dtype)
            want = mlp_reference.gated_mlp(x, gate_up, down)
            with poisoned():
                got = mlp_kernel.gated_mlp(x, gate_up, down)
                total = residual.clone()
                assert mlp_kernel.gated_mlp(x, gate_up, down, add_to=total) is total
            assert relative_error(got.float(), want.float()) <= tolerance
            assert relative_error(total.float(), residual.float() + want.float()) <= tolerance
