"""The expected peak: an upper bound of the simulated one, in the right order; weights levelled for it."""

import numpy as np
import pytest

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.expected import expected_peak, level_for
from moe_runtime.eplb.solve import solve
from moe_runtime.eplb.state import State
from moe_runtime.placement.topology import Topology


def plan(loads_RN):
    """A plan of one layer: every slot an expert of its own."""
    units = np.rint(np.asarray(loads_RN, np.float64) * 2**40)
    table = np.arange(units.size).reshape(1, *units.shape)
    return State.of(table, units.reshape(1, -1))


def simulated(state, error):
    noise = np.exp(np.random.default_rng(0).normal(0, error, (2000, *state.share_LRN.shape)))
    return float((state.share_LRN * noise).sum(axis=3).max(axis=2).mean())


def test_without_error_it_is_the_peak():
    state = plan([[1, 2], [2, 3]])
    assert expected_peak(state, 0.0).tolist() == state.peak_L.tolist() == [5 * 2.0**40]


@pytest.mark.parametrize("error", [0.02, 0.1, 0.2])
def test_it_bounds_the_simulated_peak(error):
    state = plan(np.random.default_rng(1).lognormal(0, 0.3, (48, 2)))
    assert simulated(state, error) <= expected_peak(state, error)[0]


def test_more_heavy_ranks_and_larger_slots_make_it_larger():
    one, many = plan([[2, 2], *[[1.8, 1.8]] * 15]), plan([*[[2, 2]] * 8, *[[1.8, 1.8]] * 8])
    lumpy = plan([*[[3.9, 0.1]] * 8, *[[1.8, 1.8]] * 8])
    assert one.peak_L == many.peak_L == pytest.approx(lumpy.peak_L)
    for measure in (simulated, lambda state, error: expected_peak(state, error)[0]):
        assert measure(one, 0.1) < measure(many, 0.1)
        assert measure(many, 0.1) < measure(lumpy, 0.1)


def test_levelling_for_it_lowers_it_and_loses_no_load():
    """Expert 0 shares two ranks; the companion on the one is a single expert, on the other two small ones."""
    table = np.array([[[0, 1, -1], [0, 2, 3]]])
    units = np.rint(np.array([[4.0, 6.0, 3.0, 3.0]]) * 2**40)
    plain, safe = State.of(table, units), State.of(table, units)
    level_for(plain, np.zeros(1), 10, 0.0)
    for _ in range(4):
        level_for(safe, np.zeros(1), 10, 0.2)
    assert safe.load_LR.sum() == plain.load_LR.sum() == units.sum()
    assert safe.load_LR.tolist() == safe.share_LRN.sum(axis=2).tolist()
    assert safe.share_LRN[0, 0, 0] < plain.share_LRN[0, 0, 0]
    assert expected_peak(safe, 0.2) < expected_peak(plain, 0.2)


def test_levelling_leaves_a_layer_at_its_goal_alone():
    """The allowances raise every rank; without the mean of them on top no layer would be at its goal."""
    units = np.rint(np.array([[4.0, 5.0, 5.02]]) * 2**40)
    for goal, changes in ((7.0, True), (7.1, False)):
        state = State.of(np.array([[[0, 1], [0, 2]]]), units)
        before = state.share_LRN.copy()
        level_for(state, np.array([goal]) * 2**40, 10, 0.05)
        assert bool((state.share_LRN != before).any()) == changes


def test_an_error_that_is_none_is_refused():
    with pytest.raises(BalanceError, match="next_error = -1.0"):
        solve(np.ones((1, 4)), Topology(nodes=1, ranks_per_node=2), 4, next_error=-1.0)
