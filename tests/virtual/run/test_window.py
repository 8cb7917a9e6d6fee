"""What ranks would have counted: rows of steps under the loads of their time, with noise."""

from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.engine.agree import StepDecision, StepKind
from moe_runtime.virtual.cluster.records import StepRun
from moe_runtime.virtual.cluster.times import plain_cost
from moe_runtime.virtual.cost.balance import Drift
from moe_runtime.virtual.run.loads import Assumed
from moe_runtime.virtual.run.window import WindowCounter
from tests.virtual.run.small import assumed


def run_of(rows: list[int], steps: int, seconds: float = 1.0) -> StepRun:
    none, cost = np.zeros(2, np.int64), plain_cost(seconds)
    cost.parts["experts"] = seconds / 2
    return StepRun(
        instance="decode-0",
        first_step=0,
        steps=steps,
        start=0.0,
        seconds=seconds,
        decision=StepDecision(kind=StepKind.FORWARD, rows=sum(rows)),
        decode_R=np.array(rows, np.int64),
        prefill_R=none,
        cached_R=none,
        recomputed_R=none,
        preemptions_R=none,
        kv_used_R=none,
        cost=cost,
    )


def test_a_window_holds_the_rows_of_its_steps_under_the_loads_of_their_time():
    what = assumed()
    counter = WindowCounter(assumed=what, interval=10_000, random=np.random.default_rng(0))
    assert counter.steps_left(3_000) == 4
    assert not counter.count(run_of([1_000, 2_000], 2), what.load_LE)
    assert counter.steps_left(3_000) == 2
    assert counter.count(run_of([1_000, 3_000], 1), what.load_LE[::-1].copy())
    window = counter.close()
    mean_LE = 2 * (6_000 * what.load_LE + 4_000 * what.load_LE[::-1]) / 10
    assert window.pairs_LE == pytest.approx(mean_LE, rel=0.1)
    assert (window.pairs_LE != mean_LE).any(), "counting is noisy"
    assert window.seconds_per_pair == pytest.approx(2 * 1.0 / (10_000 * 2 * 2))
    assert counter.steps_left(10_000) == 1
    assert not counter.close().pairs_LE.any()
    on_demand = WindowCounter(assumed=what, interval=None, random=np.random.default_rng(0))
    assert not on_demand.count(run_of([10**9, 10**9], 100), what.load_LE)
    assert on_demand.close().pairs_LE.any()


def test_steps_stray_and_a_window_of_many_strays_less():
    def spread(steps: int) -> float:
        counter = WindowCounter(assumed=assumed(0.3), interval=1, random=np.random.default_rng(1))
        found = []
        for _ in range(200):
            counter.count(run_of([50_000, 50_000], steps), counter.assumed.load_LE)
            found.append(counter.close().pairs_LE[0, 0] / steps / 20_000)
        return float(np.std(found))

    one, many = spread(1), spread(100)
    assert one == pytest.approx(0.3, rel=0.25)
    assert many == pytest.approx(one / 10, rel=0.3)


def test_what_a_sequence_adds_stays_with_it():
    """A hundred steps of the same hundred sequences tell no more of the others than one step does."""
    strays = replace(assumed(), drift=Drift(common=0.0, sequence=3.0), tokens_of_sequence=1e9)

    def spread(what: Assumed) -> float:
        counter = WindowCounter(assumed=what, interval=1, random=np.random.default_rng(1))
        found = []
        for _ in range(200):
            counter.count(run_of([50, 50], 10_000), what.load_LE)
            found.append(counter.close().pairs_LE[0, 0] / 200_000)
        return float(np.std(found))

    assert spread(strays) == pytest.approx(0.3, rel=0.25)
    assert spread(replace(strays, tokens_of_sequence=100.0)) == pytest.approx(0.03, rel=0.25)
