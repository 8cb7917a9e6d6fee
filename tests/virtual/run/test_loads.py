"""Expert loads of a simulation: what `--balance` means, and what is drawn of it."""

import numpy as np
import pytest

from moe_runtime.errors import InputError
from moe_runtime.placement.placement import linear
from moe_runtime.spec.catalog import CATALOG
from moe_runtime.spec.model import serve_shared_in_slots
from moe_runtime.virtual.cost.balance import Drift
from moe_runtime.virtual.cost.loads import deepseek_v3
from moe_runtime.virtual.run.history import LoadHistory
from moe_runtime.virtual.run.loads import Assumed, DeploymentLoads, LoadChoice, expert_loads
from tests.virtual.run.small import MODEL

DEEPSEEK = CATALOG["deepseek-v3"]


@pytest.mark.parametrize("text", ["recorded", "uniform", "power:0.5", "balancedness:0.7"])
def test_choices_are_said_as_they_were_asked_for(text):
    assert str(LoadChoice.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "even", "power", "power:", "power:x", "power:-1", "power:nan", "balancedness:0", "uniform:1"]
)
def test_other_choices_are_refused_by_name(text):
    with pytest.raises(InputError, match="--balance"):
        LoadChoice.parse(text)


def test_defaults_are_recorded_loads_or_as_uneven_a_power_law():
    assert str(LoadChoice.default(DEEPSEEK)) == "recorded"
    choice = LoadChoice.default(CATALOG["qwen3-235b"])
    assert choice.kind == "power"
    order = linear(num_layers=58, num_experts=256, num_ranks=32)

    def balancedness(load_LE):
        load_LR = order.rank_load(load_LE)
        return float((load_LR.mean(axis=1) / load_LR.max(axis=1)).mean())

    recorded = [balancedness(deepseek_v3(role)) for role in ("prefill", "decode")]
    synthetic = balancedness(expert_loads(choice, DEEPSEEK, role="decode", ranks=32, seed=0))
    assert synthetic == pytest.approx(np.mean(recorded), rel=0.05)


def test_recorded_loads_are_of_one_model():
    decode = expert_loads(LoadChoice("recorded"), DEEPSEEK, role="decode", ranks=8, seed=0)
    assert np.array_equal(decode, deepseek_v3("decode"))
    with pytest.raises(InputError, match="3 of 32"):
        expert_loads(LoadChoice("recorded"), MODEL, role="decode", ranks=8, seed=0)


def test_a_target_is_met_by_experts_in_order():
    load_LE = expert_loads(LoadChoice("balancedness", 0.6), DEEPSEEK, role="decode", ranks=16, seed=0)
    load_LR = linear(num_layers=58, num_experts=256, num_ranks=16).rank_load(load_LE)
    assert (load_LR.mean(axis=1) / load_LR.max(axis=1)).mean() == pytest.approx(0.6, abs=0.01)


def test_every_token_goes_to_shared_experts_in_slots():
    served = serve_shared_in_slots(DEEPSEEK)
    load_LE = expert_loads(LoadChoice("uniform"), served, role="decode", ranks=8, seed=0)
    assert load_LE.shape == (58, 257)
    assert load_LE[:, 256] == pytest.approx(load_LE[:, :256].sum(axis=1) / 8)


def make_loads(drift: float) -> DeploymentLoads:
    load_LE = expert_loads(LoadChoice("power", 0.5), MODEL, role="decode", ranks=4, seed=0)
    placement = linear(num_layers=3, num_experts=32, num_ranks=4, redundant_experts=4)
    return DeploymentLoads(
        Assumed(
            load_LE=load_LE,
            placement=placement,
            redundant_experts=4,
            moe_layers=(1, 2, 3),
            top_k=4,
            ranks_per_node=4,
            drift=Drift(common=drift, sequence=0.0),
            tokens_per_sequence=1.0,
        )
    )


def layers(loads: DeploymentLoads, tokens: float):
    """Of five steps."""
    ran = {"decode-0": (np.zeros(1), np.full(1, 5.0))}
    return LoadHistory({"decode-0": loads}).layers(ran, tokens)


def test_balancedness_is_of_the_same_draws_everywhere():
    """Without drift, large batches are as balanced as the long-run loads, and small ones less so."""
    loads = make_loads(0.0)
    large = layers(loads, 1e7)
    assert [b.mean for b in large] == pytest.approx([b.of_sum for b in large], rel=1e-2)
    assert [b.layer for b in large] == [1, 2, 3]
    found = loads.step_balancedness(np.array([0.0, 4.0, 64.0, 1e7]))
    assert np.isnan(found[0])
    assert found[1] < found[3], "few tokens fall unevenly"
    assert found[3] == pytest.approx(np.mean([b.mean for b in large]), rel=1e-2)
    small = np.mean([b.mean for b in layers(loads, 64.0)])
    assert found[2] == pytest.approx(small, rel=0.1)
    drifting = layers(make_loads(0.5), 1e7)
    assert np.mean([b.mean for b in drifting]) < np.mean([b.of_sum for b in drifting])


def test_loads_before_are_those_of_experts_in_order():
    assumed = make_loads(0.0)
    rows = assumed.rank_loads("decode-0")
    assert rows.before == rows.after
