"""Inputs that are rare: views with strides, NaN in one row, counts past the rows, blocks far apart, nothing.

Every one of them once gave wrong results, or memory of others was written, or belongs to such a case.
"""

import math
from typing import Any

import pytest
import torch

from moe_runtime.kernels.choose_slots.reference import choose_slots as choose_reference
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.grouped_gemm import formats
from moe_runtime.kernels.grouped_gemm.reference import grouped_gemm as product_reference
from moe_runtime.kernels.kv_write.reference import kv_write as write_reference
from moe_runtime.kernels.permute.reference import permute as permute_reference
from moe_runtime.kernels.permute.reference import unpermute as unpermute_reference
from moe_runtime.kernels.quantize_fp8_block.reference import quantize_fp8_block as quantize_reference
from moe_runtime.kernels.rms_norm.reference import rms_norm as norm_reference
from moe_runtime.kernels.route.reference import route as route_reference
from moe_runtime.kernels.silu_mul.reference import silu_mul as silu_reference
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import normal, poisoned, relative_error
from tests.kernels.triton.paged import paged

choose_slots = interpreted("choose_slots").choose_slots
decode = interpreted("gqa_decode").gqa_decode
product = interpreted("grouped_gemm").grouped_gemm
kv_write = interpreted("kv_write").kv_write
plans = interpreted("paged")
permute = interpreted("permute").permute
unpermute = interpreted("permute").unpermute
quantize = interpreted("quantize_fp8_block").quantize_fp8_block
rms_norm = interpreted("rms_norm").rms_norm
route = interpreted("route").route
silu_mul = interpreted("silu_mul").silu_mul
silu_mul_quantize = interpreted("silu_mul_quantize").silu_mul_quantize

ROUTER: dict[str, Any] = {"scoring": "sigmoid", "num_groups": 1, "kept_groups": 1, "normalize": True}
ROUTER |= {"masked_group_score": -math.inf, "epsilon": 1e-20, "scale": 2.5, "top_k": 3}
STARTS, COUNTS = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)


def test_strides():
    for logits in (normal(32, 9).t(), normal(9, 64)[:, ::2]):
        bias = normal(64, seed=1)[::2]
        assert torch.equal(route(logits, bias, **ROUTER)[0], route_reference(logits, bias, **ROUTER)[0])
    y, rows, weights = normal(12, 40), torch.arange(12).flip(0).view(3, 4).t(), normal(3, 4, seed=2).t()
    assert torch.equal(unpermute(y, rows, weights), unpermute_reference(y, rows, weights))
    x, w, weights = normal(4, 64), normal(2, 8, 64, seed=1), normal(8, seed=2)[::2]
    want = product_reference(x, w, STARTS, COUNTS, row_weights_N=weights)
    assert relative_error(product(x, w, STARTS, COUNTS, row_weights_N=weights), want) <= 1e-6
    x, w = normal(5, 64), normal(128, seed=1)[::2]
    assert relative_error(rms_norm(x, w, 1e-6), norm_reference(x, w, 1e-6)) <= 1e-6
    got, want = torch.zeros(4, 16, 32), torch.zeros(4, 16, 32)
    entries, slots = normal(32, 5).t(), torch.arange(10)[::2]
    kv_write(got, slots, entries)
    write_reference(want, slots, entries)
    assert torch.equal(got, want)
    start, slots = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([5, 2, 7], dtype=torch.int32)
    shares = torch.tensor([0, 20_000, 40_000], dtype=torch.uint16)
    where: dict[str, Any] = {"request_T": torch.arange(80)[::2], "position_T": torch.arange(120)[::3]}
    where |= {"mode": "sticky"}
    ids = torch.zeros(40, 1, dtype=torch.int64)
    got = choose_slots(ids, start, slots, shares, 0, **where)
    assert torch.equal(got, choose_reference(ids, start, slots, shares, 0, **where))


def test_attention_refuses_what_it_would_write_elsewhere():
    cache = paged((40, 3), 2 * 2 * 32, 16, torch.float32)
    q, plan, wide = normal(2, 4, 32), cache.plan(plans), torch.full((2, 160), 7.0)
    for queries, out, match in (
        (q, wide[:, :128], "cache and output"),
        (normal(2, 32, 4).transpose(1, 2), torch.empty(2, 128), "query head"),
    ):
        with pytest.raises(KernelError, match=match):
            decode(queries, cache.cache_BSE, plan, 0.2, out_DX=out)
    with pytest.raises(KernelError, match="sinks"):
        decode(q, cache.cache_BSE, plan, 0.2, out_DX=torch.empty(2, 128), sinks_A=normal(4).bfloat16())


def test_products_begin_at_multiples_of_16_bytes_and_may_have_no_inputs():
    x, w = normal(4 * 64 + 1)[1:].view(4, 64), normal(2, 8, 64)
    with pytest.raises(KernelError, match="begin at multiples of 16 bytes"):
        product(x, w, STARTS, COUNTS)
    with poisoned():
        assert torch.equal(product(x[:, :0], w[..., :0], STARTS, COUNTS), torch.zeros(4, 8))


@pytest.mark.parametrize("zero_gaps", [False, True])
@pytest.mark.parametrize("starts", [(0, 8, 16), (0, 8, 90), (0, 40, 90)])
def test_groups_past_the_rows_write_to_nobody(starts, zero_gaps, monkeypatch):
    """As `permute` gives them if its capacity was too small: what has room is right, the rest is cut."""
    memory = torch.full((64, 64), 7.0)
    new_empty = torch.Tensor.new_empty

    def first_rows(x, *shape, **how):
        return memory[:16] if shape == (16, 64) else new_empty(x, *shape, **how)

    monkeypatch.setattr(torch.Tensor, "new_empty", first_rows)
    x, w = normal(16, 64), normal(3, 64, 64, seed=1)
    first, counts = torch.tensor([starts, (8, 40, 50)], dtype=torch.int32)
    got = product(x, w, first, counts, zero_gaps=zero_gaps, rows_per_slot=8)
    want = product_reference(x, w, first, torch.minimum(counts, (16 - first).clamp(min=0)))
    owned = slice(0, 8 if starts[1] > 16 and not zero_gaps else 16)
    assert relative_error(got[owned], want[owned]) <= 1e-6
    assert (memory[16:] == 7.0).all()


def test_a_capacity_that_does_not_suffice():
    """What has no room is dropped, and its place says so."""
    x, ids = normal(4, 16), torch.tensor([[0, 1]] * 4)
    got_x, rows, starts, counts = permute(x, ids, 2, capacity=5)
    want_x, want_rows, *want = permute_reference(x, ids, 2)
    assert torch.equal(got_x, want_x[:5])
    assert torch.equal(rows, want_rows.masked_fill(want_rows >= 5, -1))
    assert torch.equal(torch.stack((starts, counts)), torch.stack(want))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_stays_one_and_stays_bad(bad):
    """NaN must not become the largest number of fp8, nor the limit of an activation."""
    x = normal(4, 256)
    broken = x.clone()
    broken[2, 5] = bad
    for power_of_two in (False, True):
        clean, _ = quantize(x, power_of_two=power_of_two)
        q, scales = quantize(broken, power_of_two=power_of_two)
        assert torch.equal(q[[0, 1, 3]].view(torch.uint8), clean[[0, 1, 3]].view(torch.uint8))
        assert not (q[2, :128].float() * scales[2, 0]).isfinite().all()
    q, scales = quantize(broken, rows_per_block=128)
    assert not (q[2, :128].float() * scales[0, 0]).isfinite().all()
    logits = broken[:, :32]
    ids = route(logits, None, **ROUTER)[0]
    assert torch.equal(ids[[0, 1, 3]], route(x[:, :32], None, **ROUTER)[0][[0, 1, 3]])
    assert len(set(ids[2].tolist()) & set(range(32))) == 3


@pytest.mark.parametrize("kind", ["silu", "gpt_oss"])
@pytest.mark.parametrize("limit", [math.inf, 7.0])
def test_activations_keep_nan(kind, limit):
    gate, up = normal(3, 128), normal(3, 128, seed=1)
    gate[1, 3] = up[2, 5] = math.nan
    how: dict[str, Any] = {"kind": kind, "limit": limit}
    got = silu_mul(gate, up, **how)
    assert torch.equal(got.isnan(), silu_reference(gate, up, **how).isnan())
    q, _ = silu_mul_quantize(gate, up, **how)
    assert torch.equal(q.float().isnan(), got.isnan())


@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_at_the_edges_of_fp8(power_of_two):
    """Zero, denormals, exact powers of two, what saturates, and the largest number of fp32."""
    values = (0.0, 448.0, 449.0, 448 * 2.0**-5, 2.0**-126, 2.0**-149, 1e-10, 3.4e38)
    x = torch.tensor(values)[:, None].expand(-1, 256)
    for rows_per_block in (1, 128):
        how: dict[str, Any] = {"rows_per_block": rows_per_block, "power_of_two": power_of_two}
        (q, scales), (want_q, want_scales) = quantize(x, **how), quantize_reference(x, **how)
        assert torch.equal(scales, want_scales)
        assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))


@pytest.mark.parametrize("byte", [0x00, 0x77, 0x88, 0xFF])
def test_every_nibble_and_extreme_scales(byte):
    published = torch.full((2, 8, 64), byte, dtype=torch.uint8)
    published[1] = torch.arange(64) * 4 + 3
    int4 = torch.tensor([1.0, -3.0, 1e-3, 2.0**120]).repeat(2, 8, 1).bfloat16()
    e8m0 = torch.tensor([1, 127, 0, 250], dtype=torch.uint8).repeat(2, 8, 1)
    x = torch.eye(128)[[0, 33, 66, 127]].bfloat16()
    for kind, scales in ((formats.Int4, int4), (formats.Mxfp4, e8m0)):
        weight = kind(formats.words(published), scales)
        got = product(x, weight, STARTS, COUNTS, out_dtype=torch.float32)
        want = product_reference(x, weight, STARTS, COUNTS, out_dtype=torch.float32)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=2.0**-124)  # e8m0 0 counts as zero


def test_blocks_far_apart():
    """Numbers of blocks past 2^15, and the same sequences in the first blocks."""
    tables, entries = torch.tensor([[39_999, 32_768, 2], [32_767, 35_000, 1]]), normal(6, 16, 32)
    cache = torch.full((40_000, 16, 32), math.nan)
    cache[tables.view(-1)] = entries
    outputs = []
    for where, blocks in ((cache, tables), (entries, torch.arange(6).view(2, 3))):
        plan = plans.plan_decode(blocks, torch.tensor([40, 48]), max_context=48, block_tokens=16)
        outputs.append(torch.empty(2, 32))
        decode(normal(2, 2, 16, seed=1), where, plan, 0.2, out_DX=outputs[-1])
    assert torch.equal(*outputs)


def test_a_rank_without_slots():
    none = torch.zeros(0, dtype=torch.int32)
    assert silu_mul(normal(0, 8), normal(0, 8), counts_s=none).shape == (0, 8)
    assert quantize(normal(0, 128), counts_s=none)[0].shape == (0, 128)
    assert product(normal(0, 64), normal(0, 8, 64), none, none).shape == (0, 8)
