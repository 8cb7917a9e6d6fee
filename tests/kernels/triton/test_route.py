"""route: every published router, ties, groups, and the numbers that go wrong in bf16."""

import math
from typing import Any

import pytest
import torch

from moe_runtime.kernels.route.reference import route as reference
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import ROWS, normal, poisoned, relative_error

module = interpreted("route")
route = module.route


@pytest.fixture
def many_per_program(monkeypatch):
    """The interpreter's cost is per program."""
    monkeypatch.setattr(module, "TOKENS", 128)


def how(scoring: str, top_k: int, **changes: Any) -> dict[str, Any]:
    return {
        "scoring": scoring,
        "top_k": top_k,
        "num_groups": 1,
        "kept_groups": 1,
        "masked_group_score": -math.inf,
        "normalize": True,
        "epsilon": 0.0,
        "scale": 1.0,
    } | changes


# name -> (experts, has a bias, the router): the released models, tokens few and sizes whole.
ROUTERS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": (64, False, how("softmax", 6, normalize=False)),
    "DeepSeek-V2": (160, False, how("softmax", 6, num_groups=8, kept_groups=3, normalize=False, scale=16.0)),
    "DeepSeek-V3": (256, True, how("sigmoid", 8, num_groups=8, kept_groups=4, epsilon=1e-20, scale=2.5)),
    "DeepSeek-V3, masked with 0": (
        256,
        True,
        how("sigmoid", 8, num_groups=8, kept_groups=4, masked_group_score=0.0, epsilon=1e-20, scale=2.5),
    ),
    "DeepSeek-V4-Flash": (256, True, how("sqrt_softplus", 6, scale=1.5)),
    "DeepSeek-V4-Pro": (384, True, how("sqrt_softplus", 6, scale=2.5)),
    "Kimi-K2": (384, True, how("sigmoid", 8, epsilon=1e-20, scale=2.827)),
    "GLM-4.5": (160, True, how("sigmoid", 8, epsilon=1e-20, scale=2.5)),
    "MiniMax-M2": (256, True, how("sigmoid", 8)),
    "Qwen3-235B": (128, False, how("softmax", 8)),
    "Mixtral": (8, False, how("softmax", 2)),
    "OLMoE": (64, False, how("softmax", 8, normalize=False)),
    "gpt-oss-120b": (128, False, how("softmax_selected", 4, normalize=False)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_published_routers(name):
    experts, biased, router = ROUTERS[name]
    logits = normal(7, experts, seed=1) * 3
    bias = normal(experts, seed=2) * 0.1 if biased else None
    check(logits, bias, router)


@pytest.mark.usefixtures("many_per_program")
@pytest.mark.parametrize("tokens", ROWS)
def test_any_number_of_tokens(tokens):
    check(normal(tokens, 32, seed=3), normal(32, seed=4), how("sigmoid", 4, num_groups=4, kept_groups=2))


@pytest.mark.usefixtures("many_per_program")
@pytest.mark.parametrize("masked", [0.0, -math.inf])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "sqrt_softplus", "softmax_selected"])
def test_ties_go_to_the_lower_id_and_masked_scores_differ(scoring, masked):
    """Rounded logits tie often; negative biases put choices below 0.0, on which the conventions differ."""
    logits = normal(40, 32, seed=5).round()
    bias = normal(32, seed=6).round() * 0.5 - 1.0
    check(logits, bias, how(scoring, 12, num_groups=4, kept_groups=1, masked_group_score=masked))
    check(torch.zeros(3, 32), None, how(scoring, 5, num_groups=4, kept_groups=2))


def test_bf16_logits_strided_rows_and_given_experts():
    wide = normal(9, 80, seed=7, dtype=torch.bfloat16)
    check(wide[:, 16:48], None, how("softmax", 4))
    chosen = torch.stack([torch.randperm(32)[:6] for _ in range(9)])
    router = how("sqrt_softplus", 6, scale=1.5)
    with poisoned():
        ids, weights = route(wide[:, :32], None, chosen_TK=chosen, **router)
    assert torch.equal(ids, chosen)
    want = reference(wide[:, :32], None, chosen_TK=chosen, **router)[1]
    assert relative_error(weights, want) < 1e-6


@pytest.mark.usefixtures("many_per_program")
def test_close_biases_choose_as_in_double_precision():
    """256 biases within [6.817, 7.063]: bf16 has nine values there, and would choose others."""
    bias = torch.rand(256, generator=torch.Generator().manual_seed(8)) * 0.246 + 6.817
    assert len(bias.bfloat16().unique()) <= 9
    logits = normal(1000, 256, seed=9) * 0.01
    choice = logits.double().sigmoid() + bias.double()
    want = choice.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    ids, _ = route(logits, bias, **how("sigmoid", 8))
    assert torch.equal(ids, want)
    assert torch.equal(reference(logits, bias, **how("sigmoid", 8))[0], want)


def test_a_large_bias_leaves_tiny_scores_their_weights():
    """Bias 12 and a sigmoid of 1e-7: score + bias - bias would be 0, and the weights 0 / 0."""
    logits = torch.full((2, 16), -16.118095) + normal(2, 16, seed=10) * 0.1
    bias = torch.zeros(16)
    bias[4:8] = 12.0
    ids, weights = route(logits, bias, **how("sigmoid", 4))
    assert ((ids >= 4) & (ids < 8)).all()
    scores = logits.double().sigmoid().gather(1, ids)
    assert scores.max() < 2e-7
    torch.testing.assert_close(weights.double(), scores / scores.sum(1, keepdim=True), rtol=1e-6, atol=0)
    torch.testing.assert_close(weights.sum(1), torch.ones(2), rtol=1e-6, atol=0)


def check(logits: torch.Tensor, bias: torch.Tensor | None, router: dict[str, Any]) -> None:
    want_ids, want_weights = reference(logits, bias, **router)
    with poisoned():
        ids, weights = route(logits, bias, **router)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, want_ids)
    assert weights.dtype == torch.float32
    assert relative_error(weights, want_weights) < 1e-6
