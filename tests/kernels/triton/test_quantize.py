"""quantize_fp8_block and silu_mul_quantize: values, scales, where scales lie, and what is left alone."""

import pytest
import torch

from moe_runtime.kernels.quantize_fp8_block.reference import quantize_fp8_block as reference
from moe_runtime.kernels.silu_mul_quantize.reference import silu_mul_quantize as fused_reference
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import ROWS, normal, poisoned, relative_error

quantize = interpreted("quantize_fp8_block").quantize_fp8_block
fused = interpreted("silu_mul_quantize").silu_mul_quantize


def spread(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values over many binades; a block of zeros, a tiny block, a large one."""
    x = normal(rows, columns) * torch.exp(2 * normal(rows, 1, seed=1))
    x[: rows // 3, :128] = 0
    x[rows // 3 : rows // 2, 128:] *= 1e-6
    x[rows // 2 :, -3:] *= 3e4
    return x.to(dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_rows(rows, power_of_two):
    x = spread(rows, 320)
    with poisoned():
        q, scales = quantize(x, power_of_two=power_of_two)
    want_q, want_scales = reference(x, power_of_two=power_of_two)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    assert torch.equal(scales, want_scales)
    assert scales.shape == (rows, 3)
    if rows:
        assert scales.stride() == (1, -(-rows // 4) * 4)
        widened = scales.repeat_interleave(128, 1)[:, :320]
        # Half a step of e4m3: a 16th of the value, or half of its smallest number times the scale.
        assert ((q.float() * widened - x.float()).abs() <= x.float().abs() / 16 + widened * 2**-10).all()
    if power_of_two:
        assert (scales.view(torch.int32) & 0x7FFFFF == 0).all()


@pytest.mark.parametrize(("rows", "columns"), [(1000, 320), (129, 128), (1, 7), (0, 128)])
def test_weights(rows, columns):
    """The scale grid of 1000 x 320 is 8 x 3; row 127 uses scale 0, row 128 scale 1."""
    w = normal(rows, columns, dtype=torch.bfloat16)
    if rows > 128:
        w[:128] *= 100
    with poisoned():
        q, scales = quantize(w, rows_per_block=128)
    want_q, want_scales = reference(w, rows_per_block=128)
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    assert torch.equal(scales, want_scales)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    if rows > 128:
        assert scales[0, 0] > 10 * scales[1, 0]
        for row, block in ((127, 0), (128, 1)):
            back = q[row, :128].float() * scales[block, 0]
            assert relative_error(back[None], w[row, None, :128]) < 1 / 16


def test_masked_rows_are_left_alone():
    x, counts = spread(3 * 16, 256), torch.tensor([5, 0, 16], dtype=torch.int32)
    with poisoned():
        q, scales = quantize(x, counts_s=counts)
    want_q, want_scales = reference(x)
    real = (torch.arange(16) < counts[:, None]).view(-1)
    assert torch.equal(q.view(torch.uint8)[real], want_q.view(torch.uint8)[real])
    assert torch.equal(scales[real], want_scales[real])
    assert q[~real].float().isnan().all()
    assert scales[~real].isnan().all()


@pytest.mark.parametrize("variant", [{}, {"limit": 2.0}, {"kind": "gpt_oss", "limit": 2.0}], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_with_the_activation(variant, interleaved):
    """As the reference's activation quantised, but where exp rounds across a boundary of bf16 or fp8."""
    both = normal(2 * 9, 2 * 320, dtype=torch.bfloat16) * 2
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else (both[:, :320], both[:, 320:])
    counts = torch.tensor([9, 4], dtype=torch.int32)
    real = (torch.arange(9) < counts[:, None]).view(-1)
    for power_of_two in (False, True):
        with poisoned():
            q, scales = fused(gate, up, power_of_two=power_of_two, counts_s=counts, **variant)
        want_q, want_scales = fused_reference(gate, up, power_of_two=power_of_two, **variant)
        assert q[~real].float().isnan().all()
        torch.testing.assert_close(scales[real], want_scales[real], rtol=4e-3, atol=0)
        differ = q.float()[real] != want_q.float()[real]
        assert differ.float().mean() < 2e-3
        got = q.float()[real] * scales[real].repeat_interleave(128, 1)[:, :320]
        want = want_q.float()[real] * want_scales[real].repeat_interleave(128, 1)[:, :320]
        assert relative_error(got[~differ][None], want[~differ][None]) < 1e-3
