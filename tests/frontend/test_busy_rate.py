"""The busy clock runs as far as ranks have something to do, and the rate is counted by it."""

import pytest

from moe_runtime.frontend.busy_rate import LEAST_BUSY, RATE_SECONDS, BusyRate


def test_time_without_work_does_not_count():
    rate = BusyRate(ranks=2)
    assert rate.per_second(5.0) == 0.0, "nothing is known yet"
    rate.arrive(100.0)
    rate.arrive(100.0)
    rate.start(102.0, 600.0)  # both ranks were busy for 2 s
    rate.start(104.0, 300.0)  # one of them for 2 s more: 1 busy second
    for now in (104.0, 1e6):
        assert rate.per_second(now) == pytest.approx(900.0 / 3)
    assert rate.waiting == 0


def test_what_is_given_up_counts_as_time_and_not_as_work():
    rate = BusyRate(ranks=1)
    rate.arrive(0.0)
    rate.leave(2.0)
    rate.arrive(2.0)
    rate.start(4.0, 40.0)
    assert rate.per_second(4.0) == pytest.approx(10.0)


def test_only_the_last_busy_seconds_count():
    rate = BusyRate(ranks=1)
    for second in range(40):
        rate.arrive(float(second))
        rate.start(second + 1.0, 1000.0 if second < 20 else 10.0)
    assert rate.per_second(40.0) == pytest.approx(10.0, rel=1.01 / RATE_SECONDS)


def test_a_moment_is_too_short_to_tell():
    rate = BusyRate(ranks=1)
    rate.arrive(0.0)
    rate.start(LEAST_BUSY, 5.0)
    assert rate.per_second(LEAST_BUSY) == 0.0
