"""Batch-invariant kernels: right, and the same bits for a row whatever stands beside it."""

from typing import Any

import pytest
import torch

from moe_runtime.kernels.fixed_rows import KEYS, ROWS
from moe_runtime.kernels.registry import select
from moe_runtime.models.context import PrefillSegment

COUNTS = (1, 2, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5)
WIDTHS = ((64, 64), (96, 200), (512, 257), (33, 7), (8, 8), (1, 1), (17, 31))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def invariant(operation):
    return select(operation, "cpu_invariant")


def every_row_alone(function, x, whole):
    """`function(rows)` of every window of rows gives the same bits as the whole did."""
    for count in COUNTS:
        for begin in {0, 1, 5, len(x) - count}:
            part = x[begin : begin + count]
            if len(part) == count:
                assert torch.equal(function(part), whole[begin : begin + count]), (count, begin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("K", "N"), WIDTHS)
def test_linear_and_gated_mlp(K, N, dtype):
    x, weight = randn(70, K).to(dtype), randn(N, K, seed=1).to(dtype)
    bias = randn(N, seed=2).to(dtype)
    tolerance: dict[str, Any] = (
        {"rtol": 1e-4, "atol": 1e-3} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.5}
    )
    linear = invariant("linear")
    whole = linear(x, weight, bias)
    torch.testing.assert_close(whole, select("linear", "any")(x, weight, bias), **tolerance)
    every_row_alone(lambda rows: linear(rows, weight, bias), x, whole)

    gate_up, down = randn(2 * N, K, seed=3).to(dtype) / K**0.5, randn(K, N, seed=4).to(dtype) / N**0.5
    mlp = invariant("gated_mlp")
    whole = mlp(x, gate_up, down)
    torch.testing.assert_close(whole, select("gated_mlp", "any")(x, gate_up, down), **tolerance)
    every_row_alone(lambda rows: mlp(rows, gate_up, down), x, whole)


def test_experts_in_any_slot_at_any_place():
    gate_up, down = randn(1, 64, 40) / 6, randn(1, 40, 32, seed=1) / 6
    x = randn(40, 40, seed=2)
    experts = invariant("experts")
    three = (gate_up.expand(3, -1, -1), down.expand(3, -1, -1))
    one = experts(x, torch.tensor([0]), torch.tensor([40]), gate_up, down)
    spread = experts(x, torch.tensor([0, 7, 7]), torch.tensor([7, 0, 33]), *three)
    assert torch.equal(one, spread)
    reference = select("experts", "any")(x, torch.tensor([0]), torch.tensor([40]), gate_up, down)
    torch.testing.assert_close(one, reference, rtol=1e-4, atol=1e-4)
    gaps = experts(
        x, torch.tensor([3, 20]), torch.tensor([5, 4]), three[0][:2], three[1][:2], torch.full((40,), 2.0)
    )
    assert torch.equal(gaps[3:8], 2 * one[3:8])
    assert not gaps[:3].any()
    assert not gaps[24:].any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus", "softmax_selected"])
@pytest.mark.parametrize("experts", [8, 37, 256])
def test_route(scoring, experts):
    logits, bias = 3 * randn(90, experts), randn(experts, seed=1)
    options: dict[str, Any] = {
        "top_k": 4,
        "scoring": scoring,
        "num_groups": 1,
        "kept_groups": 1,
        "masked_group_score": 0.0,
        "normalize": True,
        "epsilon": 1e-20,
        "scale": 2.5,
    }
    route = invariant("route")
    ids, weights = route(logits, bias, **options)
    expected_ids, expected = select("route", "any")(logits, bias, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)
    every_row_alone(lambda rows: route(rows, bias, **options)[1], logits, weights)


HEADS, S = 4, 4
SHAPES = {  # entry, query width, and what decode and prefill take beside cache and plan
    "mla": (12, 8, (randn(HEADS * 11, 10, seed=9), 0.3)),
    "gqa": (2 * 2 * 6, 6, (0.3,)),
}


def attention(kind, operation, q, plan, cache):
    width = HEADS * (5 if kind == "mla" else 6)
    out = torch.full((len(q), width), torch.nan)
    name = "out_DX" if operation == "decode" else "out_TX"
    invariant(f"{kind}_{operation}")(q, cache, plan, *SHAPES[kind][2], **{name: out})
    return out


def segment(start, stop, context, blocks):
    return PrefillSegment(start=start, stop=stop, context=context, blocks=torch.tensor(blocks))


@pytest.mark.parametrize("kind", list(SHAPES))
def test_attention_knows_no_chunks_no_batch_and_no_blocks(kind):
    """One prompt in one piece; in chunks beside others; as decoded rows; and in other blocks."""
    entry, width, _ = SHAPES[kind]
    length = 2 * KEYS + 9
    entries, q = randn(length, entry), randn(length, HEADS, width, seed=1)
    num_blocks = -(-length // S)

    def cache_at(blocks):
        cache = torch.full((200, S, entry), torch.nan)
        for p in range(length):
            cache[blocks[p // S], p % S] = entries[p]
        return cache

    near, far = list(range(num_blocks)), list(range(199, 199 - num_blocks, -1))
    prefill, decode = invariant("plan_prefill"), invariant("plan_decode")
    cache = cache_at(near)
    whole = attention(kind, "prefill", q, prefill([segment(0, length, 0, near)], block_tokens=S), cache)
    assert not whole.isnan().any()

    for begin, stop in ((0, 1), (5, 70), (KEYS - 1, KEYS + 1), (length - 1, length)):
        n = stop - begin
        beside = [segment(0, 3, 4, near), segment(3, 3 + n, begin, far), segment(3 + n, 5 + n, 0, near)]
        other = cache_at(far)
        other[near] = 1.0
        rows = torch.cat((randn(3, HEADS, width, seed=2), q[begin:stop], randn(2, HEADS, width, seed=3)))
        out = attention(kind, "prefill", rows, prefill(beside, block_tokens=S), other)
        assert torch.equal(out[3 : 3 + n], whole[begin:stop])

    positions = [3, length - 1, KEYS, 0]
    contexts = torch.tensor([p + 1 for p in positions])
    plan = decode(torch.tensor([near] * 4), contexts, max_context=length, block_tokens=S)
    assert torch.equal(attention(kind, "decode", q[positions], plan, cache), whole[positions])


def test_the_wider_kernels_are_not_invariant():
    """What the fixed shapes are for: if this fails, the library has changed, and they may go."""
    x, weight = randn(64, 512), randn(512, 512, seed=1)
    linear = select("linear", "cpu")
    whole = linear(x, weight)
    assert not all(torch.equal(linear(x[: n + 1], weight)[n], whole[n]) for n in range(64))
