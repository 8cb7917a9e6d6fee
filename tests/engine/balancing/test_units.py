"""Placements in stages: each is whole, the last one is the target, and moves read what is still there."""

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_runtime.engine.balancing.mover import units_of
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.placement.stages import layers_that_differ, starts_by_slot, with_layers
from moe_runtime.placement.topology import Topology

LAYERS = 2


def random_placement(rng: np.random.Generator, topology: Topology, experts: int, per_rank: int) -> Placement:
    """Replicas of random experts in random slots, some slots empty, random shares."""
    R = topology.num_ranks
    table = np.full((LAYERS, R * per_rank), -1, np.int32)
    for layer in range(LAYERS):
        extra = rng.choice(experts, rng.integers(0, R * per_rank - experts + 1), replace=True)
        rank_free = np.full(R, per_rank)
        held: list[set[int]] = [set() for _ in range(R)]
        for expert in [*rng.permutation(experts).tolist(), *extra.tolist()]:
            ranks = [r for r in range(R) if rank_free[r] and expert not in held[r]]
            if ranks:
                rank = max(ranks, key=lambda r: (rank_free[r], rng.random()))
                rank_free[rank] -= 1
                held[rank].add(expert)
        for rank, mine in enumerate(held):
            places = rank * per_rank + rng.permutation(per_rank)[: len(mine)]
            table[layer, places] = rng.permutation(sorted(mine))
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


@pytest.mark.parametrize(
    ("nodes", "ranks", "experts", "per_rank"), [(4, 8, 256, 9), (18, 8, 256, 2)], ids=["32", "144"]
)
@pytest.mark.parametrize(
    "pairs", [5, pytest.param(2500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
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
