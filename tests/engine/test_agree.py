"""Step agreement: a pure function, equal on every rank, and its wire form."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.engine.agree import (
    NO_OFFER,
    VERSION,
    AgreeLimits,
    MoveOffer,
    MoveOrder,
    MovePhase,
    StepKind,
    StepProposal,
    agree,
    step_tokens,
    vector_words,
)
from moe_runtime.engine.exchange import SharedExchange
from moe_runtime.errors import PeerLost, StepTimeout
from tests.wall import at_most

LIMITS = AgreeLimits(
    max_batch_tokens=512, chunk_tokens=128, dispatch_max_tokens=256, dispatch_mode="per_step"
)


def proposal(decode=0, prefill=0, in_flight=0, stop=False, ranks=4, epoch=0, alive=None) -> StepProposal:
    return StepProposal(
        decode_tokens=decode,
        prefill_tokens=prefill,
        in_flight=in_flight,
        stop=stop,
        placement_epoch=epoch,
        membership_epoch=0,
        alive=alive or (True,) * ranks,
    )


@given(
    decode=st.integers(0, 2**40),
    prefill=st.integers(0, 2**40),
    stop=st.booleans(),
    alive=st.lists(st.booleans(), min_size=1, max_size=320),
)
def test_vector_round_trip(decode, prefill, stop, alive):
    before = proposal(decode, prefill, 1, stop, epoch=3, alive=tuple(alive))
    vector = before.to_vector()
    assert vector.dtype == np.int64
    assert len(vector) == vector_words(len(alive))
    assert StepProposal.from_vector(vector, len(alive)) == before


def test_another_version_is_refused():
    vector = proposal().to_vector()
    vector[0] = VERSION + 1
    with pytest.raises(ValueError, match=f"version {VERSION + 1}"):
        StepProposal.from_vector(vector, 4)


proposals = st.lists(
    st.builds(
        proposal,
        decode=st.integers(0, 256),
        prefill=st.integers(0, 5000),
        in_flight=st.integers(0, 1),
        stop=st.booleans(),
        epoch=st.integers(0, 3),
    ),
    min_size=4,
    max_size=4,
)


@given(proposals)
def test_no_rank_runs_more_than_its_rounds_can_carry(offered):
    decision = agree(offered, LIMITS)
    if decision.kind is not StepKind.FORWARD:
        assert not any(p.decode_tokens or p.prefill_tokens for p in offered)
        return
    for p in offered:
        tokens = step_tokens(p, decision.token_level, LIMITS.chunk_tokens)
        assert tokens <= decision.rounds * decision.round_tokens
        assert tokens >= p.decode_tokens
        assert tokens - p.decode_tokens <= LIMITS.chunk_tokens
        assert tokens <= LIMITS.max_batch_tokens
        if decision.dispatch_mode == "low_latency":
            assert p.prefill_tokens == 0
            assert tokens <= LIMITS.dispatch_max_tokens
    # Somebody makes progress.
    assert any(step_tokens(p, decision.token_level, LIMITS.chunk_tokens) for p in offered)
    assert decision.placement_epoch == min(p.placement_epoch for p in offered)


@pytest.mark.parametrize(
    ("offered", "kind"),
    [
        ([proposal()] * 4, StepKind.PARK),
        ([proposal(), proposal(in_flight=1), proposal(), proposal()], StepKind.FLUSH),
        ([proposal(stop=True)] * 3 + [proposal()], StepKind.PARK),
        ([proposal(stop=True)] * 4, StepKind.STOP),
        ([proposal(stop=True)] * 3 + [proposal(decode=1)], StepKind.FORWARD),
        ([proposal(stop=True, in_flight=1)] * 4, StepKind.FLUSH),
    ],
)
def test_kinds(offered, kind):
    assert agree(offered, LIMITS).kind is kind


def test_an_idle_rank_takes_part_with_no_tokens():
    decision = agree([proposal(decode=3), proposal(), proposal(prefill=40), proposal()], LIMITS)
    assert decision.kind is StepKind.FORWARD
    assert decision.token_level == 3 + LIMITS.chunk_tokens
    assert step_tokens(proposal(), decision.token_level, LIMITS.chunk_tokens) == 0


@pytest.mark.parametrize(
    ("asked", "offered", "micro_batches", "mode", "rounds"),
    [
        ("normal", [proposal(decode=3)] * 4, 1, "normal", 1),
        ("per_step", [proposal(decode=3)] * 4, 1, "low_latency", 1),
        ("per_step", [proposal(decode=256), *[proposal()] * 3], 1, "low_latency", 1),
        ("per_step", [proposal(decode=257), *[proposal()] * 3], 1, "normal", 2),
        ("per_step", [proposal(decode=512), *[proposal(decode=1)] * 3], 2, "low_latency", 1),
        ("per_step", [proposal(decode=3), *[proposal()] * 2, proposal(prefill=1)], 1, "normal", 1),
        ("low_latency", [proposal(decode=300), *[proposal(prefill=9)] * 3], 1, "low_latency", 2),
    ],
)
def test_the_dispatch_mode_is_agreed(asked, offered, micro_batches, mode, rounds):
    """Low-latency per step only if every rank decodes and one round carries the largest micro-batch."""
    limits = replace(LIMITS, dispatch_mode=asked, micro_batches=micro_batches)
    decision = agree(offered, limits)
    assert (decision.dispatch_mode, decision.rounds) == (mode, rounds)
    assert decision == agree([StepProposal.from_vector(p.to_vector(), 4) for p in offered], limits)


def test_a_rank_that_sees_a_dead_peer_decides_for_all():
    mask = (True, False, True, True)
    decision = agree([proposal(decode=1), proposal(), proposal(alive=mask), proposal()], LIMITS)
    assert decision.alive == mask


def exchanges(ranks: int, timeout: float) -> list[SharedExchange]:
    window = SharedExchange.create_window(ranks)
    return [SharedExchange(window, rank=r, num_ranks=ranks, timeout=timeout) for r in range(ranks)]


def test_all_ranks_of_a_shared_exchange_see_the_same_vectors():
    ranks, steps = 4, 200
    seen: list[list[list[int]]] = [[] for _ in range(ranks)]

    def run(exchange: SharedExchange, rank: int) -> None:
        for step in range(steps):
            if (step + rank) % 37 == 0:
                time.sleep(0.001)
            vectors = exchange(step, np.full(vector_words(ranks), 1000 * step + rank, np.int64))
            seen[rank].append([int(v[0]) for v in vectors])

    threads = [
        threading.Thread(target=run, args=(e, r)) for r, e in enumerate(exchanges(ranks, timeout=30.0))
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert seen[0] == [[1000 * step + r for r in range(ranks)] for step in range(steps)]
    assert all(s == seen[0] for s in seen)


def test_a_dead_rank_is_named_long_before_the_deadline():
    window = SharedExchange.create_window(2)
    mine = SharedExchange(window, rank=0, num_ranks=2, timeout=60.0)
    code = (
        "import sys; from moe_runtime.engine.exchange import SharedExchange\n"
        "from moe_runtime.shared_memory import WindowAddress\n"
        f"address = WindowAddress({window.address.pid}, {window.address.fd}, {window.address.size})\n"
        "SharedExchange.open(address, rank=1, num_ranks=2, timeout=60.0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1, agreement, step 0: no longer running"):
        mine(0, np.zeros(vector_words(2), np.int64))
    assert time.monotonic() - began < at_most(5)


def test_all_dead_ranks_are_named_though_another_is_late():
    first, *_ = exchanges(4, timeout=60.0)
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    for index in (2, 3):
        first._pids[index][0] = child.pid
    began = time.monotonic()
    with pytest.raises(PeerLost, match="ranks 2, 3, agreement, step 0: no longer running"):
        first(0, np.zeros(vector_words(4), np.int64))
    child.wait()
    assert time.monotonic() - began < at_most(5)


def test_a_rank_that_ends_while_all_are_parked_is_named():
    first, second, _ = exchanges(3, timeout=60.0)
    second.look(7)
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    first._pids[2][0] = child.pid
    with pytest.raises(PeerLost, match="rank 2, agreement, step 7: no longer running"):
        first.look(7)
    child.wait()


def test_a_missing_rank_is_named_within_the_deadline():
    first, _, third = exchanges(3, timeout=0.3)
    errors = []

    def run(exchange: SharedExchange) -> None:
        try:
            exchange(0, np.zeros(vector_words(3), np.int64))
        except StepTimeout as error:
            errors.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=run, args=(e,)) for e in (first, third)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert time.monotonic() - began < at_most(5)
    assert [e.ranks for e in errors] == [(1,), (1,)]
    assert all("rank 1" in str(e) and "step 0" in str(e) for e in errors)


# -- moving experts --------------------------------------------------------------------------------


def moving(*offers: MoveOffer, **kinds: bool) -> MoveOrder:
    """What ranks with these offers are ordered to do; all idle or all decoding."""
    proposals = [replace(proposal(decode=1, **kinds), move=offer) for offer in offers]
    wire = [StepProposal.from_vector(p.to_vector(), 4) for p in proposals]
    assert [p.move for p in wire] == list(offers)
    order = agree(wire, LIMITS).move
    idle = [replace(p, decode_tokens=0) for p in proposals]
    assert agree(idle, LIMITS).kind is StepKind.PARK
    assert agree(idle, LIMITS).move == order
    return order


def test_a_unit_begins_and_commits_on_all_ranks_or_none():
    ready, staging, staged = (MoveOffer(1 << 40, phase) for phase in MovePhase)
    assert moving(ready, ready) == MoveOrder(begin=1 << 40, moving=True)
    assert moving(staged, staged) == MoveOrder(commit=1 << 40, moving=True)
    for offers in (
        (ready, NO_OFFER),
        (staged, staging),
        (staging, staging),
        (ready, replace(ready, ticket=7)),
    ):
        assert moving(*offers) == MoveOrder(moving=True), offers
    assert moving(NO_OFFER, NO_OFFER) == MoveOrder()


def test_one_rank_that_fails_ends_the_attempt():
    staged = MoveOffer(5, MovePhase.STAGED)
    assert moving(staged, replace(staged, failed=True)) == MoveOrder(abort=True)
    assert moving(NO_OFFER, replace(staged, failed=True)) == MoveOrder(abort=True)
