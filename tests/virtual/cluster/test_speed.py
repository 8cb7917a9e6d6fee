"""What simulations cost: twentieths of the two large ones, and work that grows as the requests do."""

import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import simulate as benchmark
from moe_runtime.virtual.cluster.requests import VirtualRequest, VirtualScheduler
from tests.virtual.cluster.small import TICK, Kept, plan, small_cluster

TRACE = Path(__file__).resolve().parents[4] / "shared/data/traces/mooncake_conversation_trace.jsonl"
PART = 1 / 20
ROOM = 8  # a busy machine, or a slow one; and a slice fills and empties the cluster as the whole does


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "conversation", marks=pytest.mark.skipif(not TRACE.exists(), reason=f"there is no {TRACE}")
        ),
        "synthetic",
    ],
)
def test_a_twentieth_of_a_large_simulation_takes_a_twentieth_of_the_time(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # of other tests
    line = benchmark.measure(name, TRACE, PART)
    assert line["failed"] == 0
    assert line["cpu_seconds"] < ROOM * PART * benchmark.SECONDS
    assert line["peak_gigabytes"] - before < benchmark.GIGABYTES / 4
    if name == "synthetic":
        # Nearly every step changes: it is the ranks that are left alone which save the time.
        assert line["step_records"] > 0.8 * line["steps"]
    else:
        assert line["step_records"] < 0.3 * line["steps"]


def steady(count: int) -> list[VirtualRequest]:
    rng = np.random.default_rng(0)
    return [
        VirtualRequest(
            index=index,
            at=index * 2_000 * TICK,
            input_length=int(rng.integers(5, 40)),
            output_length=int(rng.integers(1, 60)),
        )
        for index in range(count)
    ]


def work(monkeypatch: pytest.MonkeyPatch, count: int) -> Counter[str]:
    """Calls of schedulers, turns, records and events that serving so many requests takes."""
    done: Counter[str] = Counter()
    for name in ("propose", "count", "settle", "advance", "horizon"):
        real = getattr(VirtualScheduler, name)

        def counted(self, *args, _real=real, _name=name, **more):
            done[_name] += 1
            return _real(self, *args, **more)

        monkeypatch.setattr(VirtualScheduler, name, counted)
    where = plan({"prefill": {"expert_parallel": 2}, "decode": {"expert_parallel": 8}})
    kept = Kept()
    cluster = small_cluster(
        where,
        kept,
    )
    cluster.run(steady(count))
    monkeypatch.undo()
    done["turns"] = sum(i.turns for i in cluster.instances.values())
    done["records"], done["events"] = len(kept.runs), cluster.clock.num_events
    return done


def test_work_grows_as_the_requests_do(monkeypatch):
    small, large = work(monkeypatch, 150), work(monkeypatch, 600)
    for name, number in small.items():
        assert large[name] < 4 * 1.15 * number, (name, number, large[name])
    # Of ten ranks few are touched in a turn.
    assert large["propose"] + large["advance"] < 4 * large["turns"]
