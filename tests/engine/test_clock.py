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


def test_warm_up_is_in_no_step():
    clock = StepClock(trace=True)
    run_a_layer(clock)
    before = time.monotonic()
    clock.begin(0)
    clock.enter("waiting")
    run_a_layer(clock)
    wall = clock.end()
    spans = clock.take_spans()
    assert wall == pytest.approx(sum(clock.seconds))
    assert wall == pytest.approx(sum(s.end - s.start for s in spans))
    assert min(s.start for s in spans) >= before
    stretches = [(PHASES[s.phase], s.layer) for s in spans if PHASES[s.phase] != "waiting"]
    assert stretches[-2:] == [("attention", 3), ("experts", 3)]
    assert set(stretches[:-2]) <= {("other", OUTSIDE)}
    assert clock.take_spans() == []
