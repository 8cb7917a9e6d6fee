"""The arithmetic of benchmarks/loaded_server.py: arrivals, shared prefixes, what counts as good."""

import io
import json
import time
from pathlib import Path

import pytest

from moe_runtime.frontend.trace import read_trace
from moe_runtime.report.records import RequestRecord
from tests.script import load_script


@pytest.fixture(scope="module")
def load():
    return load_script("benchmarks/loaded_server.py")


def bench(load, tmp_path: Path, times: list[int], hash_ids: list[list[int]] | None = None):
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": t,
            "input_length": 512 * len(ids),
            "output_length": 64,
            "hash_ids": ids,
        }
        for t, ids in zip(times, hash_ids or [[i] for i in range(len(times))], strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = read_trace(path, scale_lengths=1 / 32)
    return load.Bench(
        checkpoint=tmp_path,
        folder=tmp_path,
        out=io.StringIO(),
        seconds=1.0,
        rounds=1,
        ttft_ms=100.0,
        requests=requests,
        prompts=[[i] * r.input_length for i, r in enumerate(requests)],
    )


def test_rounded_times_are_spread_until_the_next(load):
    assert load.spread([0, 0, 0, 3, 3, 9]) == [0, 1, 2, 3, 6, 9]
    assert load.spread([5.0]) == [5.0]


@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_arrivals_come_at_the_rate_that_was_asked_for(load, tmp_path, rate):
    it = bench(load, tmp_path, [3000 * (i // 4) for i in range(40)])
    arrivals = it.arrivals(rate, 10.0)
    assert len(arrivals) == min(40, 10 * rate)
    assert len(arrivals) / arrivals[-1].at == pytest.approx(rate)
    assert [a.prompt for a in arrivals] == list(it.prompts[: len(arrivals)])
    assert {a.sampling.max_tokens for a in arrivals} == {2}
    assert it.arrival(0, 1.0, output=1).sampling.max_tokens == 1
    thinned = it.arrivals(rate / 4, 10.0, every=4)
    assert [a.index for a in thinned] == [4 * i for i in range(len(thinned))]
    assert len(thinned) / thinned[-1].at == pytest.approx(rate / 4)


def test_requests_that_share_half_of_their_blocks_are_found(load, tmp_path):
    ids = [[0, 1, 2, 3], [5], [0, 9, 8, 7], [0, 1, 2, 3, 4, 5], [6, 6], [0, 1, 7, 7], [6, 6, 8], [0, 9, 1, 1]]
    it = bench(load, tmp_path, list(range(8)), ids)
    assert load.sharing(it.requests) == [0, 3, 5, 2, 7, 4, 6], "group by group, in order of arrival"


def record(times: list[float], error: str | None = None) -> RequestRecord:
    return RequestRecord(
        index=0,
        scheduled_arrival=0.0,
        sent=0.0,
        token_times=times,
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=len(times),
        finish_reason="length" if error is None else "error",
        error=error,
    )


def test_good_is_what_finished_within_both_objectives(load):
    in_time, late, slow = record([0.1, 0.2, 0.3]), record([0.6, 0.7]), record([0.1, 0.9])
    single, failed = record([0.5]), record([], error="HTTP 429: later")
    assert load.good([in_time, late, slow, single, failed], 500.0, 100.1) == 2
    assert load.gaps_ms([in_time, slow, failed]).round().tolist() == [100, 100, 800]
    assert load.percentiles([1.0, 2.0, 3.0])["p50"] == 2.0
    assert load.percentiles([]) == {}


def test_cores_in_use_are_told_apart(load):
    before = load.CpuUse.now()
    deadline = before.client + 0.2
    while time.process_time() < deadline:
        pass
    cores = load.CpuUse.now().since(before)
    assert cores["client"] > 0.01
    assert cores["server"] == 0.0, "this process has no children that work"
    assert cores["others"] >= 0.0


def test_the_script_that_loads_it_has_three_phases(capsys):
    with pytest.raises(SystemExit) as ended:
        load_script("benchmarks/serving_load.py").main(["--help"])
    assert ended.value.code == 0
    assert "{loads,stall,prefix}" in capsys.readouterr().out
