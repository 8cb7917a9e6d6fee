"""What a rank tells those who follow it: statuses when due, and how each request began."""

from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.engine.agree import AgreeLimits, agree, step_tokens
from moe_runtime.engine.messages import (
    ROWS_BUCKETS,
    Abort,
    Goodbye,
    Prefilled,
    Status,
    StepTokens,
    Submit,
    Watch,
)
from moe_runtime.engine.tally import Tally
from moe_runtime.engine.watchers import SOONEST_SECONDS, Watchers
from tests.engine.lone_desk import Rank, request
from tests.engine.test_agree import proposal


def test_nobody_is_told_who_did_not_ask():
    rank = Rank("unified")
    rank.give(Submit(request=request(1), handoff=False))
    rank.step()
    assert rank.outbox.take(Status) == []
    assert not rank.desk.watched
    assert rank.desk.patience() > 0.9


def test_a_watcher_hears_of_the_load_and_of_nothing_when_it_has_left():
    rank = Rank("unified")
    rank.give(Watch(frontend=0, seconds=30.0))
    (first,) = rank.outbox.take(Status)
    assert (first.instance, first.rank) == ("unified-0", 0)
    assert (first.running, first.waiting, first.kv_used) == (0, 0, 0)
    rank.give()
    assert rank.outbox.take(Status) == [], "nothing changed"
    for i in range(6):
        rank.give(Submit(request=request(i + 1), handoff=False))
    rank.step()
    rank.desk._watchers._sent[0] -= SOONEST_SECONDS
    rank.give()
    (busy,) = rank.outbox.take(Status)
    assert (busy.running, busy.waiting, busy.kv_used) == (3, 3, 6)
    assert busy.waiting_tokens == 3 * 6
    assert busy.others_tokens == 0
    rank.give(Goodbye(frontend=0, frontends=2))
    rank.give(Abort(request=1))
    assert rank.outbox.take(Status) == []


def test_other_frontends_requests_are_told_apart():
    rank = Rank("unified")
    rank.give(Submit(request=request(1 << 48), handoff=False), Submit(request=request(2), handoff=False))
    rank.give(Watch(frontend=0, seconds=30.0))
    (status,) = rank.outbox.take(Status)
    assert status.others_tokens == 6 + 5


def test_a_status_is_due_every_so_often_and_soon_after_a_change():
    watchers = Watchers()
    assert watchers.due(0.0, "idle") == []
    assert watchers.patience(0.0) == float("inf")
    watchers.watch(3, 0.5)
    assert watchers.due(1.0, "idle") == [3]
    assert watchers.due(1.4, "idle") == []
    assert watchers.patience(1.4) == pytest.approx(0.1)
    assert watchers.due(1.5, "idle") == [3]
    assert watchers.due(1.5 + SOONEST_SECONDS / 2, "busy") == []
    assert watchers.due(1.5 + SOONEST_SECONDS, "busy") == [3]
    watchers.watch(3, 0)
    assert not watchers
    assert watchers.due(9.0, "idle") == []


def test_the_first_token_says_what_was_cached_and_how_long_it_waited():
    rank = Rank("unified")
    for i in (1, 2):
        rank.give(Submit(request=request(i, length=17), handoff=False))
        for _ in range(8):
            rank.step()
        tokens = [t for batch in rank.outbox.take(StepTokens) for t in batch.tokens]
        assert tokens[0].start is not None
        assert tokens[0].start.cached_tokens == (0 if i == 1 else 16)
        assert 0 <= tokens[0].start.queue_seconds < 60
        assert all(t.start is None for t in tokens[1:])
    assert rank.desk.tally.totals().output_tokens == 10


def test_a_handoff_says_it_too():
    rank = Rank("prefill")
    rank.give(Submit(request=request(1), handoff=True))
    rank.step()
    (message,) = rank.outbox.take(Prefilled)
    assert message.start is not None
    assert message.start.cached_tokens == 0


def test_an_aborted_request_leaves_no_notes():
    rank = Rank("unified")
    rank.give(Submit(request=request(1), handoff=False), Abort(request=1))
    rank.give(Submit(request=request(2), handoff=False))
    rank.step()
    rank.give(Abort(request=2))
    assert rank.desk._arrived == {}
    assert rank.desk._starts == {}
    assert rank.at_baseline()


def test_a_tally_adds_up():
    tally = Tally(num_moe_layers=2)
    row = {
        "wall": 0.5,
        "phases": [0.1] * 7,
        "decode_tokens": 3,
        "prefill_tokens": 4,
        "cached_tokens": 16,
        "recomputed_tokens": 1,
        "preemptions": 1,
        "received_rows": np.array([5, 6]),
        "dispatch_mode": 1,
        "overlap_reason": 2,
    }
    tally.add(row, step_fill=0.5, chunk_tokens=32)
    tally.add({**row, "decode_tokens": 5000, "dispatch_mode": 0}, step_fill=1.0, chunk_tokens=16)
    totals = tally.totals()
    assert (totals.steps, totals.step_seconds, totals.step_fill) == (2, 1.0, 1.5)
    assert (totals.decode_rows, totals.prefill_rows) == (5003, 10)
    assert (totals.new_prefill_tokens, totals.cached_prefill_tokens, totals.recomputed_tokens) == (8, 32, 2)
    assert totals.received_rows == [10, 12]
    assert totals.rows_histogram[ROWS_BUCKETS.index(8)] == 1
    assert totals.rows_histogram[-1] == 1
    assert sum(totals.rows_histogram) == 2
    assert (totals.dispatch_modes, totals.overlap_reasons) == ([1, 1], [0, 0, 2, 0, 0])
    assert tally.chunk_tokens == 16


def test_prefill_of_some_ranks_waits_for_the_others_but_not_for_long():
    limits = AgreeLimits(
        max_batch_tokens=512, chunk_tokens=128, dispatch_max_tokens=256, prefill_delay_steps=3
    )
    some = [proposal(decode=4, prefill=300), proposal(decode=9), proposal(), proposal(prefill=5)]
    taken, held = [], 0
    for _ in range(8):
        decision = agree([replace(p, held_steps=held) for p in some], limits)
        assert decision.decode_only == decision.held
        assert step_tokens(some[0], decision.token_level, decision.chunk_tokens) == (
            4 if decision.held else 132
        )
        held = held + 1 if decision.held else 0
        taken.append(decision.prefill_rows)
    assert taken == [0, 0, 0, 128] * 2
    together = [proposal(decode=4, prefill=300), *[proposal(prefill=5)] * 3]
    assert not agree(together, limits).held, "every rank has some"
    alone = [proposal(prefill=300), *[proposal()] * 3]
    assert not agree(alone, limits).held, "nobody's token waits"
    assert not agree(some, replace(limits, prefill_delay_steps=0)).held


def test_ranks_take_the_smallest_chunk_that_any_of_them_can_afford():
    limits = AgreeLimits(max_batch_tokens=512, chunk_tokens=128, dispatch_max_tokens=256)
    offered = [proposal(decode=4, prefill=300), proposal(prefill=50), proposal(), proposal(decode=1)]
    free = agree(offered, limits)
    assert (free.chunk_tokens, free.token_level) == (128, 132)
    assert (free.decode_rows, free.prefill_rows) == (4, 128)
    assert free.fill == pytest.approx((132 + 50 + 0 + 1) / (4 * 132))
    careful = [replace(p, chunk_tokens=chunk) for p, chunk in zip(offered, (40, None, 24, 500), strict=True)]
    again = [type(p).from_vector(p.to_vector(), 4) for p in careful]
    assert [p.chunk_tokens for p in again] == [40, None, 24, 500]
    bound = agree(again, limits)
    assert (bound.chunk_tokens, bound.token_level, bound.prefill_rows) == (24, 28, 24)
