"""Levelling: many experts at a time give what one after the other does; the shares become 65536ths."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.solve import solve
from moe_runtime.eplb.split import cumulative_table, level_shares
from moe_runtime.eplb.state import State
from moe_runtime.placement.placement import FULL_RANGE, Placement
from moe_runtime.placement.topology import Topology


def one_after_the_other(table_RN, units_E):
    """Equal shares, then a sweep in plain Python: each expert's water poured over its ranks, in id order."""
    places = {e: np.argwhere(table_RN == e).tolist() for e in range(len(units_E))}
    share = np.zeros(table_RN.shape)
    for expert, where in places.items():
        for rank, slot in where:
            share[rank, slot] = units_E[expert] // len(where)
    for expert, where in places.items():
        if len(where) == 1:
            continue
        base = [share[rank].sum() - share[rank, slot] for rank, slot in where]
        ordered = np.sort(base)
        level = max(
            (units_E[expert] + ordered[:m].sum()) / m
            for m in range(1, len(base) + 1)
            if (units_E[expert] + ordered[:m].sum()) / m > ordered[m - 1]
            and (m == len(base) or (units_E[expert] + ordered[:m].sum()) / m <= ordered[m])
        )
        new = np.maximum(np.floor(level - np.array(base)), 0)
        new[0] += units_E[expert] - new.sum()
        for (rank, slot), value in zip(where, new, strict=True):
            share[rank, slot] = value
    return share


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_a_sweep_is_that_of_one_expert_after_the_other(ranks, per_rank, seed):
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(per_rank, ranks * per_rank))
    load = rng.integers(1, 10_000, (3, experts)).astype(float)
    where = Topology(nodes=1, ranks_per_node=ranks)
    slots = solve(load, where, ranks * per_rank, split="equal").placement.slot_to_expert_LS
    table = slots.astype(np.int64).reshape(3, ranks, per_rank)
    units = rng.integers(1, 10_000, (3, experts)).astype(float)
    state = State.of(table, units)
    level_shares(state, np.zeros(3), 1)
    for layer in range(3):
        if (state.count_LE[layer] > 1).any():
            assert state.share_LRN[layer].tolist() == one_after_the_other(table[layer], units[layer]).tolist()
    assert state.load_LR.tolist() == state.share_LRN.sum(axis=2).tolist()


def test_a_layer_above_its_goal_is_levelled_whatever_becomes_of_the_others():
    table = np.array([[[0, 1], [0, 2]]] * 3)
    units = np.array([[400.0, 500, 300], [400, 500, 500], [400, 100, 600]])
    together = State.of(table, units)
    level_shares(together, np.array([0.0, 1e9, 0.0]), 4)
    for layer in (0, 2):
        alone = State.of(table[layer : layer + 1], units[layer : layer + 1])
        level_shares(alone, np.zeros(1), 4)
        assert together.share_LRN[layer].tolist() == alone.share_LRN[0].tolist()
    assert together.share_LRN[:, :, 0].tolist() == [[100, 300], [200, 200], [400, 0]]


def test_shares_are_rounded_to_65536ths_and_none_is_nothing():
    experts = np.array([[0, 1, 0, 0, -1, 1]], np.int32)
    share = np.array([[1.0, 5.0, 0.0, 3.0, 0.0, 5.0]])
    starts, part = cumulative_table(experts, share, 2)
    placement = Placement(slot_to_expert_LS=experts, num_experts=2, num_ranks=6, cumulative_LS=starts)
    assert placement.share_LS.sum() == 2 * FULL_RANGE
    assert (part * FULL_RANGE == placement.share_LS).all()
    assert placement.share_LS[0, [1, 5, 4]].tolist() == [FULL_RANGE // 2, FULL_RANGE // 2, 0]
    assert abs(placement.share_LS[0, [0, 2, 3]] - np.array([16384, 1, 49152])).max() <= 1
