"""Drawn balance: token noise alone, the calibrated drift, balancing off, synthetic skews."""

import numpy as np
import pytest

from moe_runtime.placement.placement import linear
from moe_runtime.virtual.cost.balance import EVEN_BALANCE, Drift, draw_balance
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.cost.loads import deepseek_v3, power_law, recorded, with_balancedness
from moe_runtime.virtual.cost.published import Deployed, deployment_balance

STILL = Drift(common=0.0, sequence=0.0)
FITTED = Drift(common=constants().fitted.drift_common, sequence=constants().fitted.drift_sequence)


def test_token_noise_alone_is_what_is_known_of_it():
    """Equal experts, 256, 32 and 8 tokens a rank: known for 72 ranks are .950, .868, .764."""
    equal_LE = np.full((20, 256), 1.0)
    placement = linear(num_layers=20, num_experts=256, num_ranks=64)
    balance = draw_balance(equal_LE, placement, top_k=8, drift=STILL, draws=4)
    found = [balance.balancedness(64 * tokens) for tokens in (256, 32, 8)]
    assert found == pytest.approx([0.950, 0.868, 0.764], abs=0.02)


@pytest.mark.parametrize(
    ("role", "ranks", "tokens", "per_sequence", "measured"),
    [("prefill", 32, 16384, 4096, 0.80), ("decode", 72, 256, 1, 0.81)],
)
def test_the_fitted_drift_gives_the_measured_balancedness(role, ranks, tokens, per_sequence, measured):
    deployed = Deployed("deepseek-v3", role, ranks, 8, 32, True)
    balance = deployment_balance(deployed, FITTED, per_sequence)
    assert balance.balancedness(ranks * tokens) == pytest.approx(measured, abs=0.006)
    # Without drift the mean loads would say next to perfect.
    still = deployment_balance(deployed, STILL, per_sequence)
    assert still.balancedness(ranks * tokens) > 0.93


def test_balancing_off_falls_on_recorded_loads_as_measured_on_them():
    """Experts in order, first half of the layers: measured .673 on 8 GPUs, .613 on 16, .55 on 32."""
    load_LE = recorded("deepseek-v3-decode")
    for ranks, measured in ((8, 0.673), (16, 0.613), (32, 0.55)):
        placement = linear(num_layers=len(load_LE), num_experts=256, num_ranks=ranks)
        balance = draw_balance(load_LE, placement, top_k=8, drift=FITTED, draws=2)
        assert balance.balancedness(256 * ranks) == pytest.approx(measured, rel=0.15)


def test_all_layers_have_loads_and_later_ones_are_more_skewed():
    load_LE = deepseek_v3("decode")
    assert load_LE.shape == (58, 256)
    assert load_LE.sum(axis=1) == pytest.approx(np.ones(58))
    hottest = load_LE.max(axis=1)
    assert hottest[29:].mean() > 1.5 * hottest[:29].mean()


def test_more_tokens_never_lower_the_largest_load():
    load_LE = power_law(4, 64, 1.0)
    placement = linear(num_layers=4, num_experts=64, num_ranks=8)
    balance = draw_balance(load_LE, placement, top_k=4, drift=Drift(common=0.2, sequence=2.0), draws=3)
    tokens = np.unique(np.geomspace(1, 1e8, 400).astype(int))
    largest = np.array([[s.rows * t for s in balance.spreads(float(t))] for t in tokens])
    assert (np.diff(largest, axis=0) >= -1e-9 * largest[1:]).all()
    assert (np.diff([[s.rows for s in balance.spreads(float(t))] for t in tokens], axis=1) >= 0).all()


def test_few_long_prompts_are_less_balanced_than_many_short_ones():
    drift = Drift(common=0.15, sequence=2.0)
    assert drift.of(1e9) == pytest.approx(0.15)
    assert drift.of(64) > drift.of(512) > drift.of(4096)
    load_LE = power_law(4, 64, 0.5)
    placement = linear(num_layers=4, num_experts=64, num_ranks=8)
    long, short = (
        draw_balance(load_LE, placement, top_k=4, drift=drift, tokens_per_sequence=n, draws=3).balancedness(
            1e5
        )
        for n in (4096, 128)
    )
    assert long < short


def test_synthetic_skews_are_what_was_asked_for():
    uniform = power_law(3, 64, 0.0)
    assert uniform == pytest.approx(np.full((3, 64), 1 / 64))
    for target in (0.9, 0.6, 0.4):
        load_LE = with_balancedness(6, 64, 8, target)
        load_LR = linear(num_layers=6, num_experts=64, num_ranks=8).rank_load(load_LE)
        assert (load_LR.mean(axis=1) / load_LR.max(axis=1)).mean() == pytest.approx(target, abs=0.01)
    assert EVEN_BALANCE.balancedness(1e6) == 1.0
