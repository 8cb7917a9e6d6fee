"""Recommended replicas: growth at once and in proportion, shrinking slowly, never back and forth."""

import math

import pytest

from moe_runtime.frontend.advice import Advice, Policy, Signals, advise, signals_of
from moe_runtime.frontend.board import Board
from tests.frontend.test_metrics import status

POLICY = Policy(queue_seconds=2.0, cooldown=100.0, most=16)


def signals(replicas: int = 2, *, queue: float = 0.0, kv: float = 0.5, load_seconds: float = 30.0) -> Signals:
    return Signals(
        role="decode",
        replicas=replicas,
        tokens_in_flight=0,
        queue_seconds=queue,
        kv_use=kv,
        load_seconds=load_seconds,
    )


@pytest.mark.parametrize(
    ("given", "wanted", "named"),
    [
        (signals(), 2, "within bounds"),
        (signals(queue=3.0), 3, "3.0 s of work queue"),
        (signals(queue=math.inf), 4, "at most twice as many"),
        (signals(kv=0.95), 3, "95% of KV"),
        (signals(16, queue=50.0), 16, "no more than the policy has"),
        (signals(kv=0.2), 1, "1 would do"),
        (signals(1, kv=0.0), 1, "never none"),
        (signals(kv=0.4), 2, "one alone would be used at 0.94 of its bound"),
    ],
)
def test_one_look(given, wanted, named):
    got = advise(given, POLICY, None, now=0.0)
    assert got.replicas == wanted, named
    if wanted != given.replicas:
        assert named.split(",")[0] in got.reason or "twice" in named


def follow(load: list[tuple[float, Signals]]) -> list[int]:
    previous: Advice | None = None
    out = []
    for now, given in load:
        previous = advise(given, POLICY, previous, now)
        out.append(previous.replicas)
    return out


def test_growing_waits_while_the_last_replica_loads_shrinking_for_the_cooldown():
    quiet, busy = signals(2, kv=0.1), signals(2, queue=3.0)
    assert follow([(0, signals(2)), (1, busy), (2, busy)]) == [2, 2, 2]
    assert follow(
        [(0, signals(2)), (40, busy), (41, signals(2, queue=9.0)), (75, signals(2, queue=9.0))]
    ) == [
        2,
        3,
        3,
        4,
    ]
    assert follow([(0, signals(2)), (50, quiet), (99, quiet), (101, quiet)]) == [2, 2, 2, 1]


def test_a_load_that_swings_does_not_make_the_advice_swing():
    swings = [(float(t), signals(2, queue=3.0 if t % 20 < 10 else 0.0, kv=0.1)) for t in range(0, 99)]
    got = follow(swings)
    assert sum(a != b for a, b in zip(got, got[1:], strict=False)) <= 2


def test_a_change_that_was_followed_starts_the_clock():
    got = follow(
        [(0, signals(2)), (200, signals(2, queue=3.0)), (230, signals(3, kv=0.1)), (320, signals(3, kv=0.1))]
    )
    assert got == [2, 3, 3, 3]


def test_signals_come_from_the_ranks_of_the_role():
    board = Board()
    for time, tokens in ((10.0, 0), (12.0, 400)):
        for rank in (0, 1):
            board.observe(
                status(rank, time=time, waiting_tokens=300, kv_used=20 + rank, output_tokens=tokens), time
            )
    got = signals_of("unified", board.ranks(), load_seconds=9.0)
    assert got.replicas == 1
    assert got.queue_seconds == pytest.approx(600 / 400)
    assert got.kv_use == 21 / 64
    assert got.tokens_in_flight == 600 + 41 * 16
