"""Admission: bounds hold, the hopeless are refused at once, and overload sheds instead of collapsing."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.frontend.admission import (
    LONGEST_RETRY,
    Admission,
    AdmissionLimits,
    Answer,
    derive_limits,
)
from moe_runtime.frontend.busy_rate import RATE_SECONDS


def limits(**changes) -> AdmissionLimits:
    values = {
        "longest": 100,
        "longest_prompt": 80,
        "running_requests": 4,
        "running_tokens": 200,
        "queue_requests": 4,
        "queue_tokens": 200,
        "max_wait": 2.0,
    }
    return AdmissionLimits(**{**values, **changes})


def test_outputs_of_one_request_that_could_never_be_let_in_together_are_named():
    admission = Admission(limits())
    assert admission.never_together(8, 400) == ""
    assert admission.never_together(9, 9) == "9 outputs at once, at most 8 are let in"
    assert admission.never_together(5, 401) == "5 outputs take 401 tokens, at most 400 are let in"


def test_limits_follow_from_the_kv_capacity():
    got = derive_limits(
        decode_ranks=4,
        rank_kv_tokens=8192,
        rank_sequences=32,
        prefill_kv_tokens=4096,
        max_positions=10_000,
        ttft_seconds=2.0,
        prompt_ranks=3,
    )
    assert (got.max_wait, got.max_first_token, got.prompt_ranks) == (1.0, 1.6, 3)
    assert (got.longest, got.longest_prompt) == (8192, 4096)
    assert (got.running_requests, got.running_tokens) == (128, 32768)
    assert (got.queue_requests, got.queue_tokens) == (128, 32768)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "named"),
    [(81, 1, "at most 80 fit"), (60, 41, "60 prompt tokens and max_tokens 41 are 101, at most 100 fit")],
)
def test_what_can_never_fit_is_refused_at_once_even_while_draining(prompt, max_tokens, named):
    admission = Admission(limits())
    admission.draining = True
    verdict = admission.offer(1, prompt_tokens=prompt, max_tokens=max_tokens, now=0.0)
    assert verdict.status is Answer.NEVER
    assert named in verdict.reason
    assert verdict.retry_after == 0.0
    assert admission.num_requests == 0


def test_not_ready_and_draining_are_503():
    admission = Admission(limits())
    admission.missing = ("decode-0 rank 3",)
    verdict = admission.offer(1, prompt_tokens=8, max_tokens=8, now=0.0)
    assert verdict.status is Answer.UNAVAILABLE
    assert "decode-0 rank 3" in verdict.reason
    admission.missing, admission.draining = (), True
    verdict = admission.offer(1, prompt_tokens=8, max_tokens=8, now=0.0)
    assert (verdict.status, verdict.retry_after >= 1.0) == (Answer.UNAVAILABLE, True)


def test_the_queue_is_bounded_in_requests_and_in_tokens():
    admission = Admission(limits())
    for i in range(8):
        assert admission.offer(i, prompt_tokens=1, max_tokens=1, now=0.0).admitted
    verdict = admission.offer(8, prompt_tokens=1, max_tokens=1, now=0.0)
    assert verdict.status is Answer.LATER
    assert "8 requests" in verdict.reason
    assert 1.0 <= verdict.retry_after <= LONGEST_RETRY
    admission = Admission(limits())
    assert sum(admission.offer(i, prompt_tokens=50, max_tokens=50, now=0.0).admitted for i in range(6)) == 4
    admission.finished(0, now=0.0)
    assert admission.offer(9, prompt_tokens=50, max_tokens=50, now=0.0).admitted


def test_a_better_priority_displaces_the_newest_of_the_worst_that_still_waits():
    admission = Admission(limits())
    for i, priority in enumerate([0, 2, 2, 2, 1, 1, 0, 0]):
        assert admission.offer(i, prompt_tokens=1, max_tokens=1, priority=priority, now=0.0).admitted
    admission.started(3, now=0.1)
    verdict = admission.offer(8, prompt_tokens=1, max_tokens=1, priority=1, now=0.2)
    assert (verdict.admitted, verdict.displaced) == (True, (2,))
    assert admission.num_requests == 8
    assert admission.offer(9, prompt_tokens=1, max_tokens=1, priority=2, now=0.2).status is Answer.LATER
    assert admission.offer(9, prompt_tokens=1, max_tokens=1, priority=1, now=0.2).displaced == (1,)


def test_deadlines():
    admission = Admission(limits(timeout=10.0))
    admission.offer(1, prompt_tokens=1, max_tokens=1, now=0.0)
    admission.offer(2, prompt_tokens=1, max_tokens=1, now=0.0, timeout=3.0)
    assert admission.next_deadline() == 3.0
    assert admission.expired(2.9) == []
    assert admission.expired(3.0) == [2]
    admission.finished(2, now=3.0)
    admission.finished(2, now=3.0)
    assert admission.expired(9.0) == []
    assert admission.expired(10.0) == [1]
    assert Admission(limits()).next_deadline() is None


def test_the_rate_is_that_of_a_busy_server_not_of_the_load():
    """A server that idles between requests has the capacity it showed while somebody waited."""
    admission = Admission(limits(queue_requests=1000, running_requests=1000))
    now = 0.0
    for i in range(10):
        admission.offer(i, prompt_tokens=9, max_tokens=1, now=now)
        admission.started(i, now + 0.1)
        admission.finished(i, now + 0.1, output_tokens=1)
        now += 5.0
    for i in range(10, 15):
        admission.offer(i, prompt_tokens=9, max_tokens=1, now=now)
    assert admission.expected_wait(0, now) == pytest.approx(5 * 0.1, rel=0.01)
    assert admission.expected_wait(-1, now) == 0.0, "what waits is less urgent"


def test_a_long_prompt_on_one_rank_does_not_close_the_others():
    admission = Admission(limits(prompt_ranks=2, running_tokens=10_000))
    now = 0.0
    for i in range(20):
        admission.offer(i, prompt_tokens=9, max_tokens=1, now=now)
        admission.started(i, now + 0.1)
        admission.finished(i, now + 0.1)
        now += 0.2
    admission.offer(50, prompt_tokens=80, max_tokens=20, now=now)
    assert admission.expected_wait(0, now) == 0.0, "the other rank has nothing to do"
    admission.offer(51, prompt_tokens=9, max_tokens=1, now=now)
    # One request at a time kept one of two ranks busy: 10 tokens in 0.1 s are what one rank does.
    assert admission.expected_wait(0, now) == pytest.approx(0.1, rel=0.01)
    admission.offer(52, prompt_tokens=9, max_tokens=1, now=now)
    assert admission.expected_wait(0, now) == pytest.approx(0.2, rel=0.01)


def test_a_prompt_that_would_miss_the_objective_waits_for_a_quiet_moment():
    admission = Admission(limits(max_wait=1.0, max_first_token=2.0, running_tokens=10_000))
    for i in range(4):
        admission.offer(i, prompt_tokens=40, max_tokens=1, now=1.0 * i)
        admission.started(i, now=1.0 * i + 1.0)
        admission.finished(i, now=1.0 * i + 1.0, output_tokens=1)
    assert admission.offer(10, prompt_tokens=20, max_tokens=1, now=5.0).admitted
    assert admission.expected_wait(0, 5.0) == pytest.approx(21 / 41)
    verdict = admission.offer(11, prompt_tokens=80, max_tokens=1, now=5.0)
    assert verdict.status is Answer.LATER, "0.5 s of waiting and 2 s of its own"
    assert admission.offer(12, prompt_tokens=9, max_tokens=1, now=5.0).admitted
    admission.finished(10, now=6.0)
    admission.finished(12, now=6.0)
    assert admission.offer(13, prompt_tokens=80, max_tokens=1, now=6.0).admitted, "nobody is before it"


def test_what_nobody_would_be_let_in_for_is_known_before_its_length():
    admission = Admission(limits(running_requests=1000, running_tokens=10_000))
    assert admission.hopeless(0, 0.0) is None
    for i in range(4):
        admission.offer(i, prompt_tokens=9, max_tokens=1, now=1.0 * i)
        admission.started(i, now=1.0 * i + 1.0)
        admission.finished(i, now=1.0 * i + 1.0, output_tokens=1)
    for i in range(4, 7):
        assert admission.hopeless(0, 5.0) is None
        assert admission.offer(i, prompt_tokens=9, max_tokens=1, now=5.0).admitted
    verdict = admission.hopeless(0, 5.0)
    assert verdict is not None
    assert verdict == admission.offer(7, prompt_tokens=1, max_tokens=1, now=5.0)
    assert verdict.status is Answer.LATER
    assert admission.hopeless(-1, 5.0) is None, "what waits is less urgent"
    admission.draining = True
    closed = admission.hopeless(-1, 5.0)
    assert closed is not None
    assert closed.status is Answer.UNAVAILABLE


def test_a_server_that_starts_nothing_is_not_sent_more_and_more():
    """Before anything was measured, what those ahead have waited is what a new request may expect."""
    admission = Admission(limits(max_wait=2.0))
    assert admission.offer(0, prompt_tokens=9, max_tokens=1, now=0.0).admitted
    assert admission.offer(1, prompt_tokens=9, max_tokens=1, now=1.9).admitted
    assert admission.offer(2, prompt_tokens=9, max_tokens=1, now=2.1).status is Answer.LATER
    assert admission.offer(3, prompt_tokens=9, max_tokens=1, priority=-1, now=2.1).admitted
    for i in (0, 1, 3):
        admission.finished(i, now=3.0)
    assert admission.offer(4, prompt_tokens=9, max_tokens=1, now=3.0).admitted


def test_old_measurements_are_forgotten():
    admission = Admission(limits(queue_requests=1000, queue_tokens=10_000, max_wait=1e9))
    for i in range(200):
        admission.offer(i, prompt_tokens=9, max_tokens=1, now=0.0)
    for i in range(100):
        admission.started(i, 0.01 * i)
    for i in range(100, 120):
        admission.started(i, 1.0 + (i - 99) * RATE_SECONDS / 20)
    now = 1.0 + RATE_SECONDS
    assert admission.expected_wait(0, now) == pytest.approx(80 / 2.0, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_bounds_hold_under_any_sequence_of_events(seed):
    rng = np.random.default_rng(seed)
    admission = Admission(limits())
    live: dict[int, tuple[int, int]] = {}
    now = 0.0
    for i in range(120):
        now += float(rng.exponential(0.2))
        prompt, output, priority = (int(n) for n in rng.integers([1, 1, -1], [90, 60, 2]))
        verdict = admission.offer(i, prompt_tokens=prompt, max_tokens=output, priority=priority, now=now)
        assert (verdict.status is Answer.NEVER) == (prompt > 80 or prompt + output > 100)
        for gone in verdict.displaced:
            assert live.pop(gone)[1] > priority
        if verdict.admitted:
            live[i] = (prompt + output, priority)
        for j in list(live):
            if rng.random() < 0.1:
                admission.started(j, now)
            if rng.random() < 0.08:
                admission.finished(j, now, output_tokens=1)
                del live[j]
        assert admission.num_requests == len(live) <= 8
        assert admission.tokens == sum(t for t, _ in live.values()) <= 400


def goodput(offered: float, *, max_wait: float, seed: int = 0) -> float:
    """Requests per second that start within 2 s, of a server that starts 10 a second one after the other."""
    admission = Admission(
        limits(
            max_wait=max_wait,
            running_requests=100,
            queue_requests=100,
            running_tokens=10_000,
            queue_tokens=10_000,
        )
    )
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / offered, int(60 * offered)))
    free_at, good = 0.0, 0
    pending: list[tuple[float, int, float]] = []
    for i, now in enumerate(arrivals.tolist()):
        while pending and pending[0][0] <= now:
            start, j, arrived = heapq.heappop(pending)
            admission.started(j, start)
            admission.finished(j, start, output_tokens=10)
            good += start - arrived <= 2.0
        if admission.offer(i, prompt_tokens=40, max_tokens=10, now=now).admitted:
            free_at = max(free_at, now) + float(rng.uniform(0.05, 0.15))
            heapq.heappush(pending, (free_at, i, now))
    return good / arrivals[-1]


def test_goodput_holds_at_four_times_the_load_a_server_can_take():
    at_capacity = goodput(10.0, max_wait=1.0)
    assert at_capacity > 8.5
    assert goodput(40.0, max_wait=1.0) >= 0.9 * at_capacity
    assert goodput(5.0, max_wait=1.0) == pytest.approx(5.0, rel=0.15), "and nobody is refused without need"
    assert goodput(40.0, max_wait=1e9) < 0.2 * at_capacity, "without the bound nearly all come too late"
