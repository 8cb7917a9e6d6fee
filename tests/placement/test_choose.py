"""Replica choice: equal to the device's reference bit for bit, even, honest about weights, sticky."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.kernels.choose_slots.reference import choose_slots
from moe_runtime.placement.choose import choose, choose_balanced, rank_offset
from moe_runtime.placement.errors import PlacementError
from moe_runtime.placement.placement import FULL_RANGE, Placement
from moe_runtime.placement.tables import near_first
from moe_runtime.placement.topology import Topology


def replicated(replicas, ranks, shares=None):
    """One layer: expert 0 on the first `replicas` ranks, the ranks' other slot full of singles."""
    others = iter(range(1, ranks + 1))
    table = [[0 if r < replicas else -1, next(others)] for r in range(ranks)]
    cumulative = None
    if shares is not None:
        cumulative = np.zeros((1, 2 * ranks), np.uint16)
        cumulative[0, : 2 * replicas : 2] = np.cumsum([0, *shares[:-1]])
    return Placement(
        slot_to_expert_LS=np.array(table, np.int32).reshape(1, -1),
        num_experts=ranks + 1,
        num_ranks=ranks,
        cumulative_LS=cumulative,
    )


@st.composite
def dispatches(draw):
    experts = draw(st.integers(1, 6))
    replicas = [draw(st.integers(1, 4)) for _ in range(experts)]
    start = np.concatenate([[0], np.cumsum(replicas)]).astype(np.int32)
    spare = draw(st.integers(0, 2))
    slots = np.concatenate([draw(st.permutations(range(int(start[-1])))), np.full(spare, -1)]).astype(
        np.int32
    )
    cumulative = []
    for count in replicas:
        cumulative += [
            0,
            *sorted(draw(st.lists(st.integers(0, 65535), min_size=count - 1, max_size=count - 1))),
        ]
    ids = draw(st.lists(st.lists(st.integers(-1, experts - 1), min_size=3, max_size=3), max_size=40))
    table = np.array([*cumulative, *[0] * spare], np.uint16)
    return np.array(ids, np.int64).reshape(-1, 3), start, slots, table, draw(st.integers(0, 65535))


@settings(max_examples=100, deadline=None)
@given(dispatches())
def test_balanced_equals_the_reference_of_the_device_bit_for_bit(dispatch):
    ids, start, slots, table, offset = dispatch
    ours = choose_balanced(ids, start, slots, table, offset)
    theirs = choose_slots(
        torch.from_numpy(ids),
        torch.from_numpy(start),
        torch.from_numpy(slots),
        torch.from_numpy(table),
        offset,
    )
    assert ours.dtype == np.int64
    assert ours.tolist() == theirs.tolist()


def test_choose_uses_the_offset_and_table_of_the_rank():
    placement = replicated(3, 4)
    ids = np.array([[0, 1], [0, -1], [0, 2]])
    start, slots = placement.replicas
    for rank in range(4):
        want = choose_slots(
            torch.from_numpy(ids),
            torch.from_numpy(start[0]),
            torch.from_numpy(slots[0]),
            torch.from_numpy(placement.cumulative_csr[0]),
            rank * 65536 // 4,
        )
        assert choose(ids, placement, 0, rank=rank).tolist() == want.tolist()


def totals(placement, tokens, ranks, replicas):
    """Tokens at each replica of expert 0 when every rank sends `tokens` of them."""
    count = np.zeros(placement.num_slots, np.int64)
    for rank in range(ranks):
        ids = np.zeros((tokens, 1), np.int64)
        slots = choose(ids, placement, 0, rank=rank)
        count += np.bincount(slots.reshape(-1), minlength=len(count))
    return count[: 2 * replicas : 2]


@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 8, 64])
def test_balanced_is_even_over_all_ranks(tokens, replicas):
    count = totals(replicated(replicas, 32), tokens, 32, replicas)
    assert count.sum() == 32 * tokens
    assert 32 * tokens >= 4 * replicas  # all of these have enough tokens to ask for balance
    assert count.max() / count.mean() <= 1.5


def test_a_thousand_tokens_on_three_equal_replicas():
    for rank in range(32):
        count = np.bincount(
            choose(np.zeros((1000, 1), np.int64), replicated(3, 32), 0, rank=rank).reshape(-1)
        )
        assert sorted(count[count > 0].tolist()) == [333, 333, 334]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=2, max_size=8), st.integers(0, 31), st.integers(1, 300))
def test_unequal_weights_are_honoured_within_one_token_per_rank(parts, rank, tokens):
    ends = np.cumsum(parts) * FULL_RANGE // sum(parts)
    shares = np.diff(ends, prepend=0)
    placement = replicated(len(parts), 32, shares)
    slots = choose(np.zeros((tokens, 1), np.int64), placement, 0, rank=rank)
    count = np.bincount(slots.reshape(-1), minlength=placement.num_slots)[: 2 * len(parts) : 2]
    assert np.abs(count - tokens * shares / FULL_RANGE).max() <= 1 + 1e-3


@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 8, 64])
def test_sticky_is_as_even_as_independent_uniform_choice(tokens, replicas):
    """Mean over trials of max/mean, against throwing dice."""
    rng = np.random.default_rng(100 * tokens + replicas)
    placement = replicated(replicas, 32)
    trials, pairs = 600, 32 * tokens
    slots = choose(
        np.zeros((trials * pairs, 1), np.int64),
        placement,
        0,
        rank=0,  # of no account when sticky
        mode="sticky",
        request_T=rng.integers(0, 2**63, trials * pairs).astype(np.uint64),
        position_T=rng.integers(0, 100_000, trials * pairs),
    ).reshape(trials, pairs)
    sticky = unevenness(slots // 2, replicas)
    assert sticky <= 1.05 * unevenness(rng.integers(0, replicas, (trials, pairs)), replicas)


def unevenness(choices, replicas):
    """Mean over trials of max/mean of the replicas' tokens."""
    counts = np.stack([(choices == r).sum(axis=1) for r in range(replicas)], axis=1)
    return (counts.max(axis=1) / counts.mean(axis=1)).mean()


def test_sticky_gives_a_token_the_same_replica_whatever_is_around_it():
    placement = replicated(4, 32)
    rng = np.random.default_rng(0)
    request = rng.integers(0, 2**63, 64).astype(np.uint64)
    position = rng.integers(0, 4096, 64)
    ids = np.zeros((64, 1), np.int64)
    whole = choose(ids, placement, 0, rank=3, mode="sticky", request_T=request, position_T=position)
    order = rng.permutation(64)
    shuffled = choose(
        ids, placement, 0, rank=9, mode="sticky", request_T=request[order], position_T=position[order]
    )
    assert (shuffled == whole[order]).all()
    for i in (0, 17, 63):
        alone = choose(
            ids[:1],
            placement,
            0,
            rank=0,
            mode="sticky",
            request_T=request[i : i + 1],
            position_T=position[i : i + 1],
        )
        assert alone[0, 0] == whole[i, 0]
    assert len(set(whole.reshape(-1).tolist())) == 4


def test_what_cannot_be_chosen_is_refused():
    placement = replicated(2, 4)
    ids = np.array([[0, 5]])
    with pytest.raises(PlacementError, match=r"pair 1: expert 5 is not in -1..4"):
        choose(ids, placement, 0, rank=0)
    with pytest.raises(PlacementError, match="needs the request number"):
        choose(ids[:, :1], placement, 0, rank=0, mode="sticky")
    with pytest.raises(PlacementError, match="mode = 'random'"):
        choose(ids[:, :1], placement, 0, rank=0, mode="random")  # type: ignore[arg-type]


def table_shares(tables, placement, expert):
    """[R, C] shares of the expert's replicas by source rank."""
    start, slots = placement.replicas
    entries = slice(start[0, expert], start[0, expert + 1])
    begin = tables[:, 0, entries].astype(np.int64)
    return np.diff(begin, axis=1, append=FULL_RANGE), slots[0, entries]


@pytest.mark.parametrize("shares", [None, (30000, 20000, 15536), (60000, 5000, 536)])
def test_near_tables_keep_totals_and_send_what_they_can_to_near_replicas(shares):
    topology = Topology(nodes=2, ranks_per_node=4)
    placement = replicated(3, 8, shares)  # all three replicas are on node 0
    tables = near_first(placement, topology)
    share_RC, slots = table_shares(tables, placement, 0)
    assert (share_RC.sum(axis=1) == FULL_RANGE).all()
    # Every replica gets what the placement says from all sources together, but for rounding at the end.
    np.testing.assert_allclose(share_RC.mean(axis=0), placement.share_LS[0, slots], atol=1)
    for c, rank in enumerate(slots // placement.slots_per_rank):
        assert abs(share_RC[rank, c] - min(FULL_RANGE, placement.share_LS[0, slots[c]] * 8)) <= 1
    single, _ = table_shares(tables, placement, 5)
    assert (single == FULL_RANGE).all()


def test_near_tables_prefer_the_own_node():
    topology = Topology(nodes=2, ranks_per_node=2)
    row = np.array([[0, 1, 2, 3, 0, 4, 5, 6]], np.int32)  # expert 0 on ranks 0 and 2
    placement = Placement(slot_to_expert_LS=row, num_experts=7, num_ranks=4)
    share_RC, _ = table_shares(near_first(placement, topology), placement, 0)
    half = FULL_RANGE
    assert share_RC.tolist()[0] == [half, 0] or share_RC.tolist()[0] == [half - 1, 1]
    assert share_RC[1, 0] >= FULL_RANGE - 1
    assert share_RC[2:, 1].tolist() == [half, half]


def test_offsets_spread_over_the_range():
    assert [rank_offset(r, 4) for r in range(4)] == [0, 16384, 32768, 49152]
