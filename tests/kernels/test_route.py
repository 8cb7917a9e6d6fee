"""route against a plain Python loop, and its CPU path against the reference, bit for bit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.kernels.registry import select
from moe_runtime.kernels.route import cpu
from moe_runtime.kernels.route.reference import route as reference


def plain(logits, bias, *, top_k, scoring, num_groups, kept_groups, masked, normalize, epsilon, scale):
    """One token, as the papers say it, in double precision on given fp32 scores."""
    scores = {
        "sigmoid": lambda: torch.sigmoid(logits),
        "softmax": lambda: torch.softmax(logits, -1),
        "sqrt_softplus": lambda: torch.nn.functional.softplus(logits).sqrt(),
        "softmax_selected": lambda: logits,
    }[scoring]()
    choice = (scores + bias if bias is not None else scores).tolist()
    size = len(choice) // num_groups
    if num_groups > 1:
        best = 2 if scoring in ("sigmoid", "sqrt_softplus") else 1
        groups = [choice[g * size : (g + 1) * size] for g in range(num_groups)]
        # fp32 addition, as in the kernel: otherwise near ties could differ.
        value = [float(torch.tensor(sorted(g)[-best:][::-1]).sum()) for g in groups]
        kept = sorted(range(num_groups), key=lambda g: (-value[g], g))[:kept_groups]
        choice = [c if e // size in kept else masked for e, c in enumerate(choice)]
    ids = sorted(range(len(choice)), key=lambda e: (-choice[e], e))[:top_k]
    weights = [float(scores[e]) for e in ids]
    if scoring == "softmax_selected":
        weights = [math.exp(w - max(weights)) for w in weights]
        weights = [w / sum(weights) for w in weights]
    total = sum(weights) + epsilon if normalize else 1.0
    return ids, [w / total * scale for w in weights]


CASES = st.fixed_dictionaries(
    {
        "scoring": st.sampled_from(["softmax", "sigmoid", "sqrt_softplus", "softmax_selected"]),
        "groups": st.sampled_from([(1, 1), (4, 2), (4, 4), (8, 1)]),
        "masked": st.sampled_from([0.0, -math.inf]),
        "normalize": st.booleans(),
        "epsilon": st.sampled_from([0.0, 1e-20]),
        "scale": st.sampled_from([1.0, 2.5, 2.827]),
        "bias": st.sampled_from([None, "spread", "negative"]),
        "tokens": st.integers(0, 9),
        "top_k": st.sampled_from([1, 4]),
        "grid": st.sampled_from([None, 0.5, 4.0]),
        "seed": st.integers(0, 2**31),
    }
)


@settings(max_examples=150, deadline=None)
@given(CASES)
def test_route_is_the_plain_loop(case):
    gen = torch.Generator().manual_seed(case["seed"])
    num_groups, kept_groups = case["groups"]
    logits = torch.randn(case["tokens"], 32, generator=gen) * 2
    if case["grid"]:  # rounded logits tie often
        logits = (logits / case["grid"]).round() * case["grid"]
    bias = None
    if case["bias"]:
        bias = torch.randn(32, generator=gen).mul_(0.1).round(decimals=1) - float(case["bias"] == "negative")
    how: dict[str, Any] = {
        "top_k": case["top_k"],
        "scoring": case["scoring"],
        "num_groups": num_groups,
        "kept_groups": kept_groups,
        "normalize": case["normalize"],
        "epsilon": case["epsilon"],
        "scale": case["scale"],
    }
    ids, weights = reference(logits, bias, masked_group_score=case["masked"], **how)
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    for t in range(case["tokens"]):
        want_ids, want_weights = plain(logits[t], bias, masked=case["masked"], **how)
        assert ids[t].tolist() == want_ids
        assert weights[t].tolist() == pytest.approx(want_weights, rel=1e-6)
    for few in (0, cpu.FEW_TOKENS):  # torch's way, then numpy's
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "FEW_TOKENS", few)
            fast_ids, fast_weights = select("route", "cpu")(
                logits, bias, masked_group_score=case["masked"], **how
            )
        assert torch.equal(fast_ids, ids)
        assert fast_ids.is_contiguous()
        assert torch.equal(fast_weights, weights)


def test_weights_ignore_the_bias_and_masked_scores_differ():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([-2.0, -2.0, 5.0, -3.0])
    how: dict[str, Any] = {
        "top_k": 2,
        "scoring": "sigmoid",
        "num_groups": 2,
        "kept_groups": 1,
        "normalize": False,
        "epsilon": 0.0,
        "scale": 1.0,
    }
    # Group 1 wins by its bias. With -inf its other expert is next; with 0.0 the masked expert 0 is
    # above that expert's negative score.
    ids, weights = reference(logits, bias, masked_group_score=-math.inf, **how)
    assert ids.tolist() == [[2, 3]]
    assert torch.equal(weights, torch.sigmoid(torch.tensor([[1.0, 0.0]])))
    ids, _ = reference(logits, bias, masked_group_score=0.0, **how)
    assert ids.tolist() == [[2, 0]]


@pytest.mark.parametrize("device", ["any", "cpu"])
def test_given_experts_keep_their_order_and_get_their_weights(device):
    """Layers that look experts up by token still weigh them by their scores."""
    logits = torch.tensor([[1.0, -2.0, 0.5, 3.0]] * 2)
    chosen = torch.tensor([[2, 0], [1, 3]])
    how: dict[str, Any] = {
        "top_k": 2,
        "scoring": "sqrt_softplus",
        "num_groups": 1,
        "kept_groups": 1,
        "masked_group_score": 0.0,
        "normalize": True,
        "epsilon": 0.0,
        "scale": 1.5,
    }
    ids, weights = select("route", device)(logits, None, chosen_TK=chosen, **how)
    assert torch.equal(ids, chosen)
    scores = torch.log1p(logits.double().exp()).sqrt().gather(1, chosen)
    torch.testing.assert_close(
        weights.double(), 1.5 * scores / scores.sum(1, keepdim=True), rtol=1e-6, atol=0
    )


def test_a_token_is_routed_alike_in_any_company():
    """Bitwise, whether it is alone (numpy's way) or among many (torch's), for top-8 of 256 in groups."""
    gen = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(300, 256, generator=gen) * 2, torch.randn(256, generator=gen) * 0.1
    how: dict[str, Any] = {
        "top_k": 8,
        "scoring": "sigmoid",
        "num_groups": 8,
        "kept_groups": 4,
        "masked_group_score": -math.inf,
        "normalize": True,
        "epsilon": 1e-20,
        "scale": 2.5,
    }
    ids, weights = cpu.route(logits, bias, **how)
    for t in (0, 150, 299):
        alone_ids, alone_weights = cpu.route(logits[t : t + 1], bias, **how)
        assert torch.equal(alone_ids[0], ids[t])
        assert torch.equal(alone_weights[0], weights[t])
