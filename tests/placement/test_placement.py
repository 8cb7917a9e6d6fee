"""Placement: invariants by name, the compact inverse, shares; topology; migration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.placement.errors import PlacementError, TopologyError
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import FULL_RANGE, Placement, linear
from moe_runtime.placement.topology import Topology


def place(rows, experts, ranks, **kwargs):
    return Placement(
        slot_to_expert_LS=np.array(rows, np.int32), num_experts=experts, num_ranks=ranks, **kwargs
    )


@pytest.mark.parametrize(
    ("rows", "experts", "ranks", "message"),
    [
        ([[0, 1, 2]], 3, 2, "divisible by 2 ranks"),
        ([[0, 1, 3, 2]], 3, 2, "layer 0, slot 2: expert ids must lie in -1..2, found 3"),
        ([[0, 1, 2, 0], [0, 1, 0, -1]], 3, 2, "layer 1: expert 2 has no replica"),
        ([[0, 1, 2, 2]], 3, 2, "layer 0: expert 2 sits twice on rank 1"),
        ([[0, 1, 2, -2]], 3, 2, "layer 0, slot 3: .* found -2"),
    ],
)
def test_broken_invariants_are_named(rows, experts, ranks, message):
    with pytest.raises(PlacementError, match=message):
        place(rows, experts, ranks)


def test_an_expert_may_sit_twice_on_a_rank_only_with_more_replicas_than_ranks():
    assert place([[0, 0, 0, 1]], 2, 2).replica_counts.tolist() == [[3, 1]]
    with pytest.raises(PlacementError, match="twice"):
        place([[0, 0, 1, -1]], 2, 2)


def test_split_weights_have_to_start_at_zero_and_not_fall():
    rows = [[0, 1, 0, 1]]
    assert place(rows, 2, 2, cumulative_LS=np.array([[0, 0, 9, 65535]])).share_LS.tolist() == [
        [9, 65535, 65527, 1]
    ]
    for bad, slot in (([[1, 0, 9, 9]], 0), ([[9, 0, 0, 9]], 0)):
        with pytest.raises(PlacementError, match=f"layer 0, slot {slot}: split weights of expert 0"):
            place(rows, 2, 2, cumulative_LS=np.array(bad))
    with pytest.raises(PlacementError, match="have shape"):
        place(rows, 2, 2, cumulative_LS=np.array([[0, 0]]))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 12), st.integers(1, 3))
def test_the_inverse_and_the_shares_are_those_of_the_table(experts, redundant, ranks, layers):
    if redundant > experts * (ranks - 1):
        return
    try:
        placement = linear(
            num_layers=layers, num_experts=experts, num_ranks=ranks, redundant_experts=min(redundant, experts)
        )
    except PlacementError:
        return  # the linear layout may meet itself on a rank
    start, slots = placement.replicas
    for layer in range(layers):
        row = placement.slot_to_expert_LS[layer].tolist()
        assert start[layer, -1] == sum(e >= 0 for e in row)
        assert (slots[layer, start[layer, -1] :] == -1).all()
        for expert in range(experts):
            mine = slots[layer, start[layer, expert] : start[layer, expert + 1]].tolist()
            assert mine == [s for s, e in enumerate(row) if e == expert]
            shares = placement.share_LS[layer, mine]
            assert shares.sum() == FULL_RANGE
            assert shares.max() - shares.min() <= 1


def test_rank_load_follows_the_split_weights():
    placement = place([[0, 1, 0, 2]], 3, 2, cumulative_LS=np.array([[0, 0, 16384, 0]]))
    assert placement.rank_load(np.array([[8.0, 1.0, 2.0]])).tolist() == [[3.0, 8.0]]


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant"),
    [(256, 3, 2), (256, 6, 2), (256, 24, 8), (256, 144, 32), (72, 5, 3), (384, 16, 0)],
)
def test_the_redundancy_that_leaves_no_surplus_slot(experts, ranks, redundant):
    topology = Topology(nodes=1, ranks_per_node=ranks)
    assert topology.surplus_slots(experts) == redundant
    assert topology.surplus_slots(experts + redundant) == 0
    # Without redundancy it works all the same: ranks with one expert more or less.
    row = linear(num_layers=1, num_experts=experts, num_ranks=ranks).slot_to_expert_LS.reshape(ranks, -1)
    counts = (row >= 0).sum(axis=1)
    assert counts.sum() == experts
    assert counts.max() - counts.min() <= 1


def test_three_ranks_take_256_experts_as_86_85_85():
    row = linear(num_layers=1, num_experts=256, num_ranks=3).slot_to_expert_LS.reshape(3, -1)
    assert (row >= 0).sum(axis=1).tolist() == [86, 85, 85]


def test_topology_parse_and_links():
    topology = Topology.parse("4x8")
    assert (topology.nodes, topology.ranks_per_node, topology.num_ranks) == (4, 8, 32)
    assert str(topology) == "4x8"
    assert topology.link_class([0, 0, 0], [0, 7, 8]).tolist() == [0, 1, 2]
    assert Topology.from_json(topology.to_json()) == topology
    assert (topology.slots_per_rank(290), topology.surplus_slots(290)) == (10, 30)


@pytest.mark.parametrize("text", ["4", "4x", "x8", "4x8x2", "-4x8", "four x eight"])
def test_a_topology_that_is_none_says_how_to_write_one(text):
    with pytest.raises(TopologyError, match="write NODESxRANKS"):
        Topology.parse(text)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"nodes": 0},
        {"ranks_per_node": 0},
        {"seconds_per_byte": (2.0, 1.0, 3.0)},
        {"seconds_per_byte": (-1.0, 1.0, 3.0)},
    ],
)
def test_topologies_that_cannot_be(kwargs):
    with pytest.raises(TopologyError):
        Topology(**{"nodes": 1, "ranks_per_node": 1, **kwargs})


def test_migration_takes_the_nearest_source_and_spreads_the_load():
    topology = Topology(nodes=2, ranks_per_node=2)
    current = place([[0, 1, 2, 0, 3, 4, 0, 5]], 6, 4)
    target = place([[1, 0, 2, 5, 3, 0, 0, 4]], 6, 4)
    plan = plan_migration(current, target, topology, 100.0)
    moves = list(zip(plan.slot_M.tolist(), plan.source_M.tolist(), plan.link_M.tolist(), strict=True))
    # slots 0, 1 swap inside rank 0; 5 comes from the other node; 0 and 4 from the neighbour rank.
    assert moves == [(0, 1, 0), (1, 0, 0), (3, 7, 2), (5, 6, 1), (7, 5, 1)]
    assert plan.total_bytes == 500.0
    assert plan.bytes_by_link == {"same_rank": 200.0, "same_node": 200.0, "other_node": 100.0}
    assert plan.moves_L.tolist() == [5]
    for layer, slot, source, expert in zip(
        plan.layer_M, plan.slot_M, plan.source_M, plan.expert_M, strict=True
    ):
        assert target.slot_to_expert_LS[layer, slot] == expert == current.slot_to_expert_LS[layer, source]
    assert len(plan_migration(current, current, topology)) == 0


def test_migration_alternates_between_equal_sources():
    topology = Topology(nodes=1, ranks_per_node=6)
    current = place([[0, 0, 1, 2, 3, 4]], 5, 6)
    target = place([[0, 0, 1, 2, 3, 4]], 5, 6)
    assert len(plan_migration(current, target, topology)) == 0
    wide = place([[0, -1, 0, -1, 1, -1, 2, -1]], 3, 4)
    filled = place([[0, -1, 0, -1, 1, 0, 2, 0]], 3, 4)
    plan = plan_migration(wide, filled, Topology(nodes=1, ranks_per_node=4))
    assert plan.source_M.tolist() == [0, 2]


def test_migration_between_different_sizes_is_refused():
    a, b = linear(num_layers=1, num_experts=4, num_ranks=2), linear(num_layers=2, num_experts=4, num_ranks=2)
    with pytest.raises(PlacementError, match="num_layers = 1, target: 2"):
        plan_migration(a, b, Topology(nodes=1, ranks_per_node=2))
    with pytest.raises(PlacementError, match="topology 1x4 is not of 2 ranks"):
        plan_migration(a, a, Topology(nodes=1, ranks_per_node=4))
