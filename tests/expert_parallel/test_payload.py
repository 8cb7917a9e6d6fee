"""Rows on the wire and the two layouts: the contract of `scales`, `values`, `starts`."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.expert_parallel.buffer import GroupedRows, MaskedRows
from moe_runtime.expert_parallel.local import LocalBuffer
from moe_runtime.expert_parallel.masked import MaskedBuffer
from moe_runtime.expert_parallel.payload import DTYPES, Payload, quantize
from moe_runtime.plan.schema import WireDtype
from moe_runtime.spec.bytes import WIRE_BYTES, wire_row_bytes


def test_it_knows_the_dtypes_of_the_plan_and_their_bytes():
    assert set(DTYPES) == set(get_args(WireDtype)) == set(WIRE_BYTES)
    for name in DTYPES:
        assert Payload(name).row_bytes(512) == wire_row_bytes(512, name)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30), blocks=st.integers(1, 3))
def test_fp8_rows_err_by_no_more_than_stated(seed, exponent, blocks):
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(4, 128 * blocks, generator=generator) * 2.0**exponent
    x_TH[0] *= torch.rand(128 * blocks, generator=generator) ** 8  # many small beside a large one
    values, scales = quantize(x_TH)
    scale_TH = scales.repeat_interleave(128, dim=1)
    error = (values.float() * scale_TH - x_TH).abs()
    assert (error <= torch.maximum(x_TH.abs() / 16, scale_TH / 1024) * (1 + 1e-5)).all()


def test_fp8_keeps_zeros_and_the_largest_value():
    x_TH = torch.zeros(2, 256)
    x_TH[1, 200] = -7.5
    values, scales = quantize(x_TH)
    assert values.dtype is torch.float8_e4m3fn
    assert torch.equal(values.float()[0], torch.zeros(256))
    assert values.float()[1, 200] * scales[1, 1] == -7.5
    assert torch.isfinite(values.float()).all()


def test_fp8_needs_whole_blocks():
    with pytest.raises(ValueError, match="hidden = 64 is not a multiple of 128"):
        Payload("float8_e4m3").encode(torch.zeros(1, 64))
    assert Payload("bfloat16").num_scales(64) == 0


def test_values_apply_the_scales_of_their_blocks():
    x = torch.tensor([[1.0, 2.0]]).repeat_interleave(128, 1)
    scales = torch.tensor([[0.5, 4.0]])
    rows = GroupedRows(x.to(torch.float8_e4m3fn), torch.tensor([0]), torch.tensor([1]), None, None, scales)
    expected = torch.tensor([[0.5, 8.0]]).repeat_interleave(128, 1)
    assert torch.equal(rows.values(torch.float32), expected)
    assert rows.values(torch.bfloat16).dtype is torch.bfloat16
    masked = MaskedRows(rows.x[None], torch.tensor([1]), None, None, scales[None])
    assert torch.equal(masked.values(torch.float32), expected[None])


def test_values_of_rows_in_the_dtype_of_the_experts_are_the_rows():
    x = torch.zeros(3, 4)
    assert GroupedRows(x, torch.tensor([0]), torch.tensor([3]), None, None).values(torch.float32) is x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
def test_masked_rows_are_grouped_rows_at_fixed_places(dtype):
    x_TH, weights_TK = torch.randn(5, 128), torch.rand(5, 2)
    slots_TK = torch.tensor([[1, -1], [1, 2], [-1, -1], [1, -1], [2, 1]])
    local = LocalBuffer(slots_per_rank=3, payload=Payload(dtype))
    grouped = local.dispatch(x_TH, slots_TK, weights_TK).wait()
    buffer = MaskedBuffer(local, capacity=5)
    masked = buffer.dispatch(x_TH, slots_TK, weights_TK).wait()
    assert masked.x.shape == (3, 5, 128)
    assert masked.starts.tolist() == [0, 5, 10]
    assert masked.counts.tolist() == grouped.counts.tolist() == [0, 4, 2]
    found, wanted = masked.values(torch.float32), grouped.values(torch.float32)
    assert torch.equal(torch.cat([found[1, :4], found[2, :2]]), wanted)
    y = torch.full_like(found, torch.nan)
    y[1, :4], y[2, :2] = found[1, :4], found[2, :2]
    assert torch.equal(buffer.combine(y, masked).wait(), local.combine(wanted, grouped).wait())


def test_rows_converted_on_one_rank_are_as_on_several():
    """EP degree 1 sends nothing, but sees the same values."""
    x_TH = torch.randn(5, 256)
    slots_TK = torch.tensor([[0, 1], [1, 0], [1, -1], [-1, -1], [0, 1]])
    weights_TK = torch.rand(5, 2)
    buffer = LocalBuffer(slots_per_rank=2, payload=Payload("float8_e4m3"))
    rows = buffer.dispatch(x_TH, slots_TK, weights_TK).wait()
    values, scales = quantize(x_TH)
    order = [0, 1, 4, 0, 1, 2, 4]
    assert torch.equal(rows.x.view(torch.uint8), values.view(torch.uint8)[order])
    assert rows.scales is not None
    assert torch.equal(rows.scales, scales[order])
