"""The lower bound against the best of all plans, found by trying every one."""

from functools import lru_cache
from itertools import combinations, product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.bound import lower_bound
from moe_runtime.eplb.loads import to_units
from moe_runtime.eplb.replicate import replica_counts
from moe_runtime.eplb.solve import solve
from moe_runtime.eplb.split import level_shares
from moe_runtime.eplb.state import State
from moe_runtime.placement.topology import Topology


@lru_cache
def all_tables(experts, ranks, slots_per_rank, slots):
    """Every plan up to the order of slots in a rank: int64 [M, R, N]."""
    contents = [c for n in range(slots_per_rank + 1) for c in combinations(range(experts), n)]
    found = []
    for plan in product(range(len(contents)), repeat=ranks):
        if list(plan) != sorted(plan):
            continue  # ranks are alike
        chosen = [contents[i] for i in plan]
        if sum(map(len, chosen)) <= slots and set().union(*chosen) == set(range(experts)):
            found.append([list(c) + [-1] * (slots_per_rank - len(c)) for c in chosen])
    return np.array(found)


def best_peaks(load, ranks, slots_per_rank, slots):
    """The smallest possible peak with equal and with free split."""
    tables = all_tables(len(load), ranks, slots_per_rank, slots)
    units, scale = to_units(np.tile(load, (len(tables), 1)))
    state = State.of(tables, units)
    equal = state.peak_L.min()
    level_shares(state, np.zeros(len(tables)), 400)
    return equal * 0.5 ** scale[0], state.peak_L.min() * 0.5 ** scale[0]


SIZES = [
    (3, 3, 2, 5),
    (4, 3, 2, 6),
    (5, 3, 2, 6),
    (4, 4, 2, 7),
    (4, 2, 3, 6),
    (3, 4, 1, 4),
    (6, 4, 2, 8),
    (5, 3, 2, 5),
]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SIZES), st.data())
def test_no_plan_is_below_the_bound_and_no_answer_below_the_best(sizes, data):
    E, R, N, S = sizes
    load = np.array(
        data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 20, 77]), min_size=E, max_size=E)), float
    )
    best_equal, best_free = best_peaks(load, R, N, S)
    topology = Topology(nodes=1, ranks_per_node=R)
    splits: tuple[tuple[Literal["equal", "weighted"], float], ...] = (
        ("equal", best_equal),
        ("weighted", best_free),
    )
    for split, best in splits:
        answer = solve(load[None], topology, S, split=split, quality="best")
        assert answer.bound_L[0] <= best_free * (1 + 1e-6) + 1e-12
        assert answer.peak_L[0] >= best * (1 - 1e-3) - 1e-12


def bound_of(load, R, N, S):
    units, scale = to_units(np.array([load], float))
    least = np.floor(units / replica_counts(units, S, R)).max(axis=1)
    found = lower_bound(units, least, np.full(1, units.sum()), ranks=R, slots_per_rank=N, slots=S, steps=30)
    return float(found.units_L[0] * 0.5 ** scale[0]), int(found.reason_L[0])


@pytest.mark.parametrize(
    ("load", "R", "N", "S", "bound", "reason"),
    [
        ([4, 4, 4, 4], 4, 1, 4, 4.0, 0),  # the mean is reached
        ([9, 1, 1, 1], 4, 1, 4, 9.0, 1),  # nothing to replicate with
        # The 9 has three replicas; the fourth rank has room for two of the 1s, so one is beside the 9.
        ([9, 1, 1, 1], 4, 2, 6, 10 / 3, 2),
        ([9, 1, 1, 1], 4, 2, 7, 3.0, 0),
        # Every rank holds two experts: one of 8, 8, 8 meets a 5.
        ([8, 8, 8, 5, 5, 5], 3, 2, 6, 13.0, 0),
        # The 10 has no second replica, and all slots are needed: somebody of the 4s is beside it.
        ([10, 4, 4, 4, 4, 4], 3, 2, 6, 14.0, 2),
    ],
)
def test_known_bounds(load, R, N, S, bound, reason):
    value, why = bound_of(load, R, N, S)
    assert value == pytest.approx(bound, rel=1e-6)
    assert why == reason
