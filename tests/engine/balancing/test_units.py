"""Placements in stages: each is whole, the last one is the target, and moves read what is still there."""

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_runtime.engine.balancing.units import units_of
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.placement.stages import layers_that_differ, starts_by_slot, with_layers
from moe_runtime.placement.topology import Topology

LAYERS = 2


def random_placement(rng: np.random.Generator, topology: Topology, experts: int, per_rank: int) -> Placement:
    """Replicas of random experts in random slots, some slots empty, random shares.

    The copies of an expert lie side by side, and entries are dealt to the ranks in turn: so copies lie on
    different ranks, unless there are more of them than ranks.
    """
    R = topology.num_ranks
    table = np.full((LAYERS, R * per_rank), -1, np.int32)
    for layer in range(LAYERS):
        extra = rng.integers(0, R * per_rank - experts + 1)
        copies = 1 + np.bincount(rng.integers(0, experts, extra), minlength=experts)
        empty = R * per_rank - copies.sum()
        order = rng.permutation(experts + empty)
        dealt = np.repeat(
            np.where(order < experts, order, -1), np.append(copies, np.ones(empty, int))[order]
        ).reshape(per_rank, R)
        table[layer] = rng.permuted(dealt[:, rng.permutation(R)].T, axis=1).reshape(-1)
    equal = Placement(slot_to_expert_LS=table, num_experts=experts, num_ranks=R, topology=topology)
    starts = (starts_by_slot(equal) * rng.random()).astype(np.uint16)
    return Placement(
        slot_to_expert_LS=table, num_experts=experts, num_ranks=R, cumulative_LS=starts, topology=topology
    )


def apply(
    slots_LS: NDArray[np.int64], current: Placement, target: Placement, topology: Topology
) -> Placement:
    """Go from one to the other on integers, unit by unit as ranks do: stage all, then commit all.

    Asserts that what is staged is the expert that the target wants, read from a slot that was not written
    since the unit began.
    """
    plan = plan_migration(current, target, topology)
    moves = np.stack([plan.layer_M, plan.slot_M, plan.source_M])
    placement = current
    for unit in units_of(current, target, moves):
        layer, slot, source = unit.moves_3M
        assert set(layer.tolist()) <= set(unit.layers[:1])
        staged = slots_LS[layer, source]
        assert (staged == target.slot_to_expert_LS[layer, slot]).all()
        assert len(np.unique(slot)) == len(slot)
        slots_LS[layer, slot] = staged
        placement = with_layers(placement, target, unit.layers)
        held = placement.slot_to_expert_LS >= 0
        assert (slots_LS[held] == placement.slot_to_expert_LS[held]).all()
    return placement


LONG = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("nodes", "ranks", "experts", "per_rank", "pairs"),
    [
        pytest.param(4, 8, 256, 9, 50, id="32 ranks"),
        pytest.param(18, 8, 256, 2, 20, id="144 ranks"),
        pytest.param(4, 8, 256, 9, 2500, id="32 ranks, many", marks=LONG),
        pytest.param(18, 8, 256, 2, 2500, id="144 ranks, many", marks=LONG),
    ],
)
def test_random_pairs_end_at_the_target(nodes, ranks, experts, per_rank, pairs):
    topology = Topology(nodes=nodes, ranks_per_node=ranks)
    rng = np.random.default_rng(nodes)
    current = random_placement(rng, topology, experts, per_rank)
    slots_LS = current.slot_to_expert_LS.astype(np.int64)
    for pair in range(pairs):
        target = random_placement(rng, topology, experts, per_rank)
        reached = apply(slots_LS, current, target, topology)
        assert (reached.slot_to_expert_LS == target.slot_to_expert_LS).all(), pair
        assert (reached.cumulative_csr == target.cumulative_csr).all(), pair
        current = reached


def test_layers_that_only_split_anew_are_told_from_those_that_move():
    current = linear(num_layers=4, num_experts=4, num_ranks=2, redundant_experts=2)
    starts = starts_by_slot(current).copy()
    starts[1, 4] = 1000  # the second replica of expert 0 begins elsewhere
    table = current.slot_to_expert_LS.copy()
    table[2, [0, 1]] = table[2, [1, 0]]
    target = Placement(slot_to_expert_LS=table, num_experts=4, num_ranks=2, cumulative_LS=starts)
    assert layers_that_differ(current, target) == ([2], [1])
    one = with_layers(current, target, [1])
    assert one.epoch == current.epoch + 1
    assert layers_that_differ(one, target) == ([2], [])
    assert layers_that_differ(with_layers(one, target, [2]), target) == ([], [])
