"""Moving from a current placement: one number trades balance against bytes, and both sides are told."""

import numpy as np
import pytest

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.solve import solve
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import linear
from moe_runtime.placement.topology import Topology

TOPOLOGY = Topology(nodes=2, ranks_per_node=4)
SLOTS = 40


def moving(*args, **kwargs):
    """A solution from a current placement, and its moves."""
    answer = solve(*args, **kwargs)
    assert answer.moves is not None
    assert answer.before_L is not None
    return answer, answer.moves


def load(seed=0, layers=3):
    return np.random.default_rng(seed).lognormal(0, 0.8, (layers, 32))


def placed(seed=0):
    return solve(load(seed), TOPOLOGY, SLOTS).placement


@pytest.mark.parametrize("split", ["equal", "weighted"])
def test_the_same_load_moves_nothing(split):
    first = solve(load(), TOPOLOGY, SLOTS, split=split)
    again, moves = moving(load(), TOPOLOGY, SLOTS, split=split, current=first.placement)
    assert len(moves) == 0
    assert (again.placement.slot_to_expert_LS == first.placement.slot_to_expert_LS).all()
    assert again.placement.epoch == first.placement.epoch + 1


@pytest.mark.parametrize("split", ["equal", "weighted"])
def test_a_longer_horizon_moves_more_and_balances_better(split):
    current, new = placed(), load(0) * np.exp(np.random.default_rng(7).normal(0, 0.4, (3, 32)))
    moves, peaks = [], []
    for horizon in (0.0, 1e-11, 1e-10, 1e-9, 1e-6):
        answer, made = moving(new, TOPOLOGY, SLOTS, current=current, horizon=horizon, split=split)
        moves.append(len(made))
        peaks.append(answer.peak_L.sum())
        assert answer.saved_seconds == pytest.approx(horizon * (answer.before_L - answer.peak_L).sum())
        assert answer.moved_bytes == len(made)
        # What it costs in all is no more than standing still with the best split of what is there.
        still = solve(new, TOPOLOGY, SLOTS, current=current, horizon=0.0, split=split)
        assert horizon * peaks[-1] + answer.move_seconds <= horizon * still.peak_L.sum() * (1 + 1e-4)
    assert moves[0] == 0
    assert moves == sorted(moves)
    assert moves[-1] > 0
    assert peaks == sorted(peaks, reverse=True)


def test_moves_are_those_of_the_placements():
    current = placed()
    answer, moves = moving(load(1), TOPOLOGY, SLOTS, current=current)
    again = plan_migration(current, answer.placement, TOPOLOGY)
    assert moves.slot_M.tolist() == again.slot_M.tolist()
    changed = (answer.placement.slot_to_expert_LS != current.slot_to_expert_LS) & (
        answer.placement.slot_to_expert_LS >= 0
    )
    assert len(moves) == changed.sum()


def test_without_a_horizon_the_balance_of_a_new_plan_comes_with_fewer_moves():
    current = placed()
    new = load(0) * np.exp(np.random.default_rng(3).normal(0, 0.1, (3, 32)))
    fresh = solve(new, TOPOLOGY, SLOTS)
    answer, moves = moving(new, TOPOLOGY, SLOTS, current=current)
    assert (answer.peak_L <= np.maximum(fresh.peak_L, fresh.bound_L * 1.005) * (1 + 1e-3)).all()
    assert len(moves) < 0.5 * len(plan_migration(current, fresh.placement, TOPOLOGY))


def test_dearer_links_are_used_less():
    dear = Topology(nodes=2, ranks_per_node=4, seconds_per_byte=(0.0, 1e-12, 1e-9))
    used = {}
    for name, topology in (
        ("dear", dear),
        ("even", Topology(nodes=2, ranks_per_node=4, seconds_per_byte=(0.0, 1e-11, 1e-11))),
    ):
        _, moves = moving(load(2), topology, SLOTS, current=placed(), horizon=1e-8)
        used[name] = moves.bytes_by_link["other_node"]
    assert used["dear"] <= used["even"]


def test_uncertain_loads_are_not_chased():
    current = placed()
    new = load(0) * np.exp(np.random.default_rng(5).normal(0, 0.05, (3, 32)))
    assert len(moving(new, TOPOLOGY, SLOTS, current=current, horizon=1.0)[1]) > 0
    assert len(moving(new, TOPOLOGY, SLOTS, current=current, horizon=1.0, uncertainty=0.2)[1]) == 0
    _, moves = moving(new, TOPOLOGY, SLOTS, current=current, horizon=1.0, uncertainty=[0.2, 0.0, 0.2])
    assert moves.moves_L[[0, 2]].tolist() == [0, 0]


def test_surplus_slots_may_be_used_up_to_the_number_asked_for():
    topology = Topology(nodes=1, ranks_per_node=8)
    current = linear(num_layers=3, num_experts=32, num_ranks=8, redundant_experts=3)
    answer = solve(load(4), topology, 35, current=current)
    assert ((answer.placement.slot_to_expert_LS >= 0).sum(axis=1) <= 35).all()


@pytest.mark.parametrize(
    ("current", "message"),
    [
        (linear(num_layers=2, num_experts=32, num_ranks=8, redundant_experts=8), "has 2 layers, the task 3"),
        (
            linear(num_layers=3, num_experts=31, num_ranks=8, redundant_experts=9),
            "has 31 experts, the task 32",
        ),
        (linear(num_layers=3, num_experts=32, num_ranks=4, redundant_experts=8), "has 4 ranks, the task 8"),
        (linear(num_layers=3, num_experts=32, num_ranks=8), "has 32 slots .* the task 40"),
    ],
)
def test_a_current_placement_of_another_shape_is_refused(current, message):
    with pytest.raises(BalanceError, match=message):
        solve(load(), TOPOLOGY, SLOTS, current=current)


def test_whole_groups_stay_on_a_node_where_that_costs_little():
    """Groups of equal load: planning node by node is as good, so it is done, and moves keep to it."""
    rng = np.random.default_rng(0)
    even = np.tile(rng.lognormal(0, 0.5, (1, 8)), (2, 4))  # 4 groups of 8 experts, alike
    answer = solve(even, TOPOLOGY, SLOTS, groups=4)
    assert answer.node_by_node_L.all()
    for row in answer.placement.slot_to_expert_LS.reshape(2, 2, -1):
        groups = [set((node[node >= 0] // 8).tolist()) for node in row]
        assert [len(g) for g in groups] == [2, 2]
        assert not groups[0] & groups[1]
    uneven = even.copy()
    uneven[:, :8] *= 10
    answer = solve(uneven, TOPOLOGY, SLOTS, groups=4)
    assert not answer.node_by_node_L.any()
