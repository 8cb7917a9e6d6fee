"""`moe-runtime simulate` at the command line: a run, and every mistake that must stop it before it starts."""

import json

import msgspec
import pytest

from moe_runtime.launch import cli
from moe_runtime.launch.commands import simulate
from moe_runtime.report.files import load_report

PLAN = """\
model: {path: "catalog:qwen3-30b"}
cluster: {nodes: 1, ranks_per_node: 8, device: cuda, hardware: h100-sxm}
deployments:
  prefill:
    expert_parallel: 4
    scheduler: {max_batch_tokens: 4096, max_sequences: 32, chunk_tokens: 4096}
    kv_cache: {block_tokens: 64, blocks: 512}
    dispatch: {backend: deepep}
  decode:
    expert_parallel: 4
    redundant_experts: 8
    scheduler: {max_batch_tokens: 64, max_sequences: 64, chunk_tokens: 64}
    kv_cache: {block_tokens: 64, blocks: 512}
    dispatch: {backend: deepep}
"""


@pytest.fixture
def files(tmp_path):
    """Paths of a plan, a trace of 40 requests and the report to write."""
    plan, trace = tmp_path / "plan.yaml", tmp_path / "trace.jsonl"
    plan.write_text(PLAN)
    rows = [dict(timestamp=100 * i, input_length=500 + 90 * i, output_length=20 + i) for i in range(40)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return plan, trace, tmp_path / "run.json"


def call(files, *more) -> int:
    plan, trace, out = files
    arguments = ["simulate", plan, "--trace", trace, "--out", out, *more]
    return cli.run([str(a) for a in arguments])


def test_a_simulated_report(files, capsys):
    plan, trace, out = files
    assert call(files, "--limit", "30", "--speed", "2") == 0
    shown, said = capsys.readouterr()
    report = load_report(out)
    assert report.simulated
    assert report.simulation is not None
    assert report.simulation.balance == "power:0.63"
    assert (report.simulation.weights, report.simulation.events) == ("bfloat16", None)
    last = max(r.last_token or 0.0 for r in report.request_log)
    assert report.simulation.virtual_seconds == pytest.approx(last, abs=0.1)
    assert (report.options.limit, report.options.speed) == (30, 2.0)
    assert (report.requests.count, report.requests.finished) == (30, 30)
    assert report.machine.cpu_model is None
    assert [d.name for d in report.deployments] == ["prefill", "decode"]
    assert all(d.attribution is not None and d.timeline is not None for d in report.deployments)
    assert any("no figure was measured" in w for w in report.warnings)
    assert any("power:0.63 is assumed" in w for w in report.warnings)
    assert "Throughput per node" in shown
    assert "hardware h100-sxm: simulated" in shown
    time_use = shown.split("Where the wall time went")[1]
    attribution = report.deployments[0].attribution
    assert attribution is not None
    idle = attribution.total.parts[-1]
    assert f"{100 * idle.share:.1f} %" in time_use
    assert "bound by launch" in time_use
    assert f"wrote {out}" in said
    assert "simulated " in said
    # The same again, with other loads: other times, the same tokens.
    assert call(files, "--limit", "30", "--speed", "2", "--balance", "uniform") == 0
    other = load_report(out)
    assert other.simulation is not None
    assert other.simulation.balance == "uniform"
    assert other.whole_run.output_tokens == report.whole_run.output_tokens
    assert other.latency != report.latency
    capsys.readouterr()
    assert cli.run(["report", str(out)]) == 0


def test_events_are_acted_out(files, tmp_path, capsys):
    events = tmp_path / "events.yaml"
    events.write_text(
        "events:\n"
        "- {failure: decode-0, at: 1.0, restart_after: 0.5}\n"
        '- {load_shift: all, at: 2, to: "topic:1", mix: 0.5}\n'
        "- {load_drift: decode, start: 2, end: 3, every: 0.5, noise: 0.1, correlation: 0.5}\n"
        "- {rebalance: decode-0, at: 3.5}\n"
    )
    assert call(files, "--events", events) == 0
    report = load_report(files[2])
    told = "\n".join(report.warnings)
    assert "decode-0 fails at 1 s and is started anew 0.5 s later; reading 18.5 GB of weights a rank" in told
    assert "From 2 s on, expert loads of 50 % of the traffic of all deployments are those of topic:1." in told
    assert "From 2 to 3 s, expert loads of decode stray by 0.1 every 0.5 s, with correlation 0.5." in told
    balancing = report.deployments[1].balancing
    assert balancing is not None
    (moved,) = balancing.rebalances
    assert (moved.instance, moved.reason, moved.outcome) == ("decode-0", "asked for", "done")
    shown = capsys.readouterr().out.split("Experts that moved, or were shared anew")[1]
    assert f"{moved.moves:,}" in shown
    assert f"{moved.balancedness_before:.3f} -> {moved.balancedness_after:.3f}" in shown
    assert "0 of 1 decisions: to leave experts where they are" in shown
    assert report.simulation is not None
    assert report.simulation.events == str(events)
    assert report.requests.failed > 0
    assert not [m for m in report.missing if m.path == "simulation.events"]


def test_the_report_is_the_same_every_time(files):
    reports = []
    for _ in range(2):
        assert call(files, "--limit", "10") == 0
        reports.append(msgspec.structs.replace(load_report(files[2]), created=""))
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--balance", "even"), "--balance is 'even', must be recorded, uniform"),
        (("--balance", "recorded"), "only loads of DeepSeek-V3"),
        (("--limit", "0"), "--limit is 0"),
        (
            ("--set", "deployments.decode.scheduler.max_sequences=x"),
            "deployments.decode.scheduler.max_sequences",
        ),
        (("--set", "cluster.hardware=cpu-host"), "cluster.hardware"),
        (("--events", "no-such.yaml"), "no-such.yaml: cannot be read"),
        (("--scale-lengths", "20"), "trace.jsonl:40: input_length"),
        (
            ("--set", "deployments.prefill.kv_cache.blocks=64", "--scale-lengths", "1.2"),
            "a rank of prefill caches 4096",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(files, capsys, more, message):
    assert call(files, *more) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert not files[2].exists()


def test_loads_that_are_none_are_named_with_their_place(files, tmp_path, capsys):
    events = tmp_path / "events.yaml"
    events.write_text("events:\n- {load_shift: all, at: 1, to: rain}\n")
    assert call(files, "--events", events) == 2
    said = capsys.readouterr().err
    assert f"{events}:2: events[0]: to is 'rain': must be start, topic:NUMBER" in said
    assert not files[2].exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0, "input_length": 8}\n', "trace.jsonl:1: output_length"),
        (
            '{"timestamp": 0, "prompt": "hello", "output_length": 3}\n',
            "trace.jsonl:1: prompt: catalog:qwen3-30b",
        ),
        ("", "trace.jsonl"),
    ],
)
def test_bad_traces_are_named(files, capsys, text, message):
    files[1].write_text(text)
    assert call(files) == 2
    assert message in capsys.readouterr().err


def test_an_output_that_is_an_input_is_refused(files, capsys):
    plan, trace, _ = files
    before = trace.read_bytes()
    assert cli.run(["simulate", str(plan), "--trace", str(trace), "--out", str(trace)]) == 2
    assert "is the same file as --trace" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_an_interrupt_ends_it_without_a_file(files, capsys, monkeypatch):
    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run_simulation", interrupted)
    assert call(files) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not files[2].exists()
