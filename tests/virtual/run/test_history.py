"""Figures of balance where loads changed on the way."""

from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.virtual.run.history import LoadHistory
from moe_runtime.virtual.run.loads import DeploymentLoads
from tests.virtual.run.small import assumed


def test_figures_of_balance_are_those_of_the_steps_with_their_loads():
    one = DeploymentLoads(assumed())
    even = DeploymentLoads(replace(one.assumed, load_LE=np.ones((2, 4))))
    history = LoadHistory({"decode-0": one, "decode-1": one})
    history.change("decode-0", 5.0, even)
    tokens = np.full(3, 1e7)
    found = history.step_balancedness("decode-0", np.array([0.0, 4.9, 5.0]), tokens)
    assert found == pytest.approx([5 / 7, 5 / 7, 1.0], abs=0.02)
    assert history.step_balancedness("decode-1", np.array([0.0, 4.9, 5.0]), tokens)[2] == found[0]
    ran = {
        "decode-0": (np.array([1.0, 6.0]), np.array([10.0, 20.0])),
        "decode-1": (np.zeros(1), np.full(1, 10.0)),
    }
    (first, second) = history.layers(ran, 1e7)
    assert (first.layer, first.steps, second.layer) == (1, 40, 2)
    assert first.mean == pytest.approx((5 / 7 + 1) / 2, abs=0.02), "half of the steps were even"
    assert first.of_sum == pytest.approx(1 / (0.5 * 1.4 + 0.5), abs=0.01)
    assert first.p5 == pytest.approx(5 / 7, abs=0.02)
