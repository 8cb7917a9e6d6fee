"""The arithmetic of benchmarks/speed.py, and that what it writes is what the runtime reads."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moe_runtime.frontend.trace import read_trace
from moe_runtime.plan.load import load_plan
from moe_runtime.report.schema import RequestRow
from tests.script import load_script


@pytest.fixture(scope="module")
def speed():
    return load_script("benchmarks/speed.py")


def log(speed, phase, *, seconds=4.0):
    """The log of a run that took `seconds` for the measured requests."""
    at = speed.WARMUP_MS / 1e3

    def row(index, arrival, last, output):
        return RequestRow(
            index=index,
            arrival=arrival,
            sent=arrival,
            first_token=arrival + 0.5,
            last_token=last,
            prompt_tokens=phase.input_length,
            cached_tokens=0,
            output_tokens=output,
            finish_reason="length",
            error=None,
        )

    warmup = [row(i, 0.0, 2.0, 8) for i in range(speed.WARMUP_REQUESTS)]
    last = [at + seconds * (i + 1) / phase.requests for i in range(phase.requests)]
    measured = [row(speed.WARMUP_REQUESTS + i, at, t, phase.output_length) for i, t in enumerate(last)]
    return warmup + measured


@pytest.fixture
def phase(speed):
    return speed.PHASES[0]


def test_rate_runs_from_first_arrival_to_last_token(speed, phase):
    figure = speed.figure_of(log(speed, phase, seconds=4.0), phase)
    assert figure["seconds"] == pytest.approx(4)
    assert figure["output_tokens_per_second"] == pytest.approx(32 * 64 / 4)
    assert figure["prompt_tokens_per_second"] == pytest.approx(32 * 128 / 4)
    assert figure["ttft_ms"] == pytest.approx(500)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (10, {"error": "no room"}, "request 10: no room"),
        (10, {"last_token": None}, "request 10: no token"),
        (10, {"output_tokens": 63}, "request 10: 128 tokens in, 63 out"),
        (10, {"cached_tokens": 16}, "request 10: 16 prompt tokens came from a cache"),
        (1, {"last_token": 10.5}, "the warm-up took longer than 10 s"),
        (1, {"error": "no room"}, "request 1: no room"),
    ],
)
def test_disturbed_measurements_are_refused(speed, phase, index, change, message):
    rows = log(speed, phase)
    rows[index] = msgspec.structs.replace(rows[index], **change)
    with pytest.raises(RuntimeError, match=message):
        speed.figure_of(rows, phase)


def test_incomplete_logs_are_refused(speed, phase):
    with pytest.raises(RuntimeError, match=r"2 \+ 31 requests"):
        speed.figure_of(log(speed, phase)[:-1], phase)


@pytest.mark.parametrize(("b", "met"), [([290, 310, 500], True), ([10, 290, 900], False)])
def test_phases_compare_medians(speed, phase, b, met):
    rows = [{"side": "A", phase.figure: v} for v in (90.0, 100.0, 400.0)]
    rows += [{"side": "B", phase.figure: v} for v in b]
    result = speed.summary(phase, rows)
    assert (result["A"], result["B"]) == (100.0, sorted(b)[1])
    assert result["ratio"] == pytest.approx(sorted(b)[1] / 100)
    assert result["target"] == 3.0
    assert result["met"] is met
    assert (result["lowest_A"], result["highest_A"]) == (90.0, 400.0)


def test_sides_alternate(speed, phase, monkeypatch):
    order: list[object] = []

    def transformers(self, phase):
        order.append("hf")
        return {}

    def moe_runtime(self, phase, expert_parallel):
        order.append(expert_parallel)
        return {}

    monkeypatch.setattr(speed.Bench, "transformers", transformers)
    monkeypatch.setattr(speed.Bench, "moe_runtime", moe_runtime)
    bench = speed.Bench(Path("x"), "float32", Path("y"))
    rows = list(bench.run(phase, 2))
    assert order == ["hf", 1, "hf", 1]
    assert [(r["side"], r["repetition"]) for r in rows] == [("A", 0), ("B", 0), ("A", 1), ("B", 1)]
    order.clear()
    list(bench.run(speed.PHASES[3], 1))
    assert order == [1, 2]


def test_traces_and_plans_are_what_the_runtime_reads(speed, tmp_path):
    for phase in speed.PHASES:
        trace = tmp_path / f"{phase.name}.jsonl"
        trace.write_text("".join(json.dumps(line) + "\n" for line in speed.trace_lines(phase)))
        requests = read_trace(trace)
        measured = requests[speed.WARMUP_REQUESTS :]
        assert len(measured) == phase.requests
        assert {r.arrival for r in measured} == {speed.WARMUP_MS / 1e3}
        assert {(r.input_length, r.output_length) for r in measured} == {(128, phase.output_length)}
        plan = tmp_path / f"{phase.name}.yaml"
        plan.write_text(speed.plan_yaml(tmp_path / "a: b", "float32", phase.expert_parallel, phase))
        unified = load_plan(plan, []).plan.deployments["unified"]
        assert unified.expert_parallel == phase.expert_parallel
        assert unified.scheduler.max_sequences == phase.batch
        room = unified.kv_cache.blocks * unified.kv_cache.block_tokens
        assert room >= (phase.requests + speed.WARMUP_REQUESTS) * (128 + 64) or phase.batch == 1


def test_a_slow_warmup_gets_more_time(speed, phase, monkeypatch, tmp_path):
    speeds = []

    def bench(self, plan, phase, speed_):
        speeds.append(speed_)
        rows = log(speed, phase)
        if len(speeds) < 3:
            rows[0] = msgspec.structs.replace(rows[0], last_token=11.0)
        return SimpleNamespace(plan_digest="x", request_log=rows)

    monkeypatch.setattr(speed.Bench, "_bench", bench)
    row = speed.Bench(Path("x"), "float32", tmp_path).moe_runtime(phase, 1)
    assert speeds == [1.0, 0.3, 0.1]
    assert row["output_tokens_per_second"] == pytest.approx(512)
