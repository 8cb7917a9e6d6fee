"""The orders, the search for counts and the swaps against plain ways to do the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.order import order_of, pick, slots_by_expert
from moe_runtime.eplb.pack import first_plan
from moe_runtime.eplb.recount import better_counts
from moe_runtime.eplb.replicate import replica_counts
from moe_runtime.eplb.search import swap_rounds
from moe_runtime.eplb.state import State


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.sampled_from([3.0, 1e9, 2.0**51, 2.0**60]), st.integers(0, 2**32 - 1))
def test_whole_numbers_are_ordered_as_by_a_stable_sort(width, largest, seed):
    """Small ranges tie often; the largest do not fit beside an index and take the slow way."""
    values = np.random.default_rng(seed).integers(-largest, largest, (3, width), endpoint=True).astype(float)
    order = order_of(values)
    assert order.tolist() == values.argsort(axis=1, kind="stable").tolist()
    assert pick(values, order).tolist() == np.sort(values, axis=1).tolist()


@pytest.mark.parametrize("experts", [5, 70_000])
def test_slots_are_ordered_by_expert_and_empty_ones_last(experts):
    table = np.array([[experts - 1, -1, 0, 3, 0, -1, experts - 1]])
    assert slots_by_expert(table, experts).tolist() == [[2, 4, 3, 0, 6, 1, 5]]


def skewed(layers, experts, seed):
    load = np.random.default_rng(seed).lognormal(0, 1, (layers, experts))
    return np.floor(load / load.max() * 2**40) + 1


def paired_peak(units_E, count_E, ranks):
    """The heaviest replica with the lightest, and so on, in plain Python."""
    share = sorted(float(u // c) for u, c in zip(units_E, count_E, strict=True) for _ in range(c))
    share = [0.0] * (2 * ranks - len(share)) + share
    return max(share[i] + share[-1 - i] for i in range(ranks))


@pytest.mark.parametrize("patience", [0, 2])
def test_better_counts_are_as_many_have_the_peak_they_say_and_are_no_worse(patience):
    units = skewed(6, 40, seed=3)
    count = replica_counts(units, 50, 25)
    settings = {"ranks": 25, "givers": 6, "patience": patience}
    goal = np.maximum(units.sum(axis=1) / 25, (units // count).max(axis=1))
    better, peak = better_counts(units, count, goal, rounds=30, **settings)
    assert better.sum(axis=1).tolist() == [50] * 6
    assert better.min() >= 1
    before = [paired_peak(units[layer], count[layer].tolist(), 25) for layer in range(6)]
    assert peak.tolist() == [paired_peak(units[layer], better[layer].tolist(), 25) for layer in range(6)]
    assert (peak <= before).all()
    assert (peak < before).any()
    done, _ = better_counts(units, count, np.array(before), rounds=30, **settings)
    assert (done == count).all()  # at its goal, a layer is left alone


@pytest.mark.parametrize("slots_per_rank", [3, 4, 5, 9])
@pytest.mark.parametrize("ranks", [2, 3, 18])
def test_swaps_lower_peaks_and_lose_nothing(ranks, slots_per_rank):
    slots = ranks * slots_per_rank
    units = skewed(4, slots - ranks // 2, seed=slots)
    count = replica_counts(units, slots, ranks)
    state = first_plan(units, count, ranks, slots_per_rank)
    before, alone = state.peak_L, state.take(np.array([2]))
    swap_rounds(state, np.zeros(4), 3)
    assert (state.peak_L <= before).all()
    if ranks > 3:
        assert (state.peak_L < before).any()
    fresh = State.of(state.expert_LRN, units)
    assert fresh.count_LE.tolist() == count.tolist()
    assert fresh.load_LR.tolist() == state.load_LR.tolist()
    ordered = np.sort(state.expert_LRN, axis=2)
    assert not (ordered[..., 1:] == ordered[..., :-1])[ordered[..., 1:] >= 0].any()
    swap_rounds(alone, np.zeros(1), 3)
    assert alone.expert_LRN.tolist() == state.expert_LRN[2:3].tolist()
