"""StepClock: phases of a step add up to it, and its trace begins with the first step."""

import time

import pytest

from moe_runtime.engine.clock import OUTSIDE, StepClock
from moe_runtime.report.records import PHASES


def run_a_layer(clock: StepClock) -> None:
    for phase in ("attention", "experts"):
        clock.at(0, 3)
        clock.enter(phase)
        time.sleep(0.001)
    clock.enter("other")
    clock.at(OUTSIDE, OUTSIDE)


def test_warm_up_is_in_no_step():
    clock = StepClock(trace=True)
    run_a_layer(clock)
    before = time.monotonic()
    clock.begin(0)
    run_a_layer(clock)
    wall = clock.end()
    spans = clock.take_spans()
    assert wall == pytest.approx(sum(clock.seconds))
    assert wall == pytest.approx(sum(s.end - s.start for s in spans))
    assert min(s.start for s in spans) >= before
    assert [PHASES[s.phase] for s in spans if PHASES[s.phase] != "other"] == ["attention", "experts"]
    assert clock.take_spans() == []
