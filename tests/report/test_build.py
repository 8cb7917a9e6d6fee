"""The definitions of the report, on records small enough to compute by hand."""

import dataclasses
import math

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_runtime.errors import MoeRuntimeError
from moe_runtime.report import balance, schema_time
from moe_runtime.report.build import build_report
from moe_runtime.report.facts import percentiles, weighted_percentiles


def build(facts, requests, steps):
    return build_report(facts, requests, steps)


def section(report, name):
    return next(d for d in report.deployments if d.name == name)


def unified(make, ranks, **changes):
    """Facts of one deployment `unified/0` of `ranks` ranks on one node."""
    planned = dataclasses.replace(
        make.facts().deployments[1], name="unified", instances=("unified/0",), expert_parallel=ranks
    )
    return make.facts(**{"deployments": (planned,), "ranks_per_node": ranks, **changes})


def alone(make, index, arrival, times, **changes):
    return make.request(
        index, arrival, times, prefill_instance="unified/0", decode_instance="unified/0", **changes
    )


def test_four_ranks_with_different_counts_are_counted_once(make):
    """1, 2, 3 and 4 sequences on the ranks: neither the first rank only, nor everything four times."""
    rows = [
        [dict(decode_tokens=n, prefill_tokens=10 * n if s == 0 else 0) for s in range(10)]
        for n in (1, 2, 3, 4)
    ]
    steps = [make.steps("unified/0", rank, r) for rank, r in enumerate(rows)]
    requests = [alone(make, i, t, [t + 0.5, t + 0.6], prompt=50) for i, t in enumerate((0.0, 10.0))]
    report = build(unified(make, 4), requests, steps)
    d = section(report, "unified")
    assert [r.mean_decode_rows for r in d.per_rank] == [1, 2, 3, 4]
    assert sum(r.decode_rows_per_second for r in d.per_rank) == pytest.approx(100 / 10)
    assert d.throughput.new_prefill.total == pytest.approx(100 / 10)
    assert d.throughput.new_prefill.per_rank == pytest.approx(100 / 10 / 4)
    assert d.throughput.output.total == pytest.approx(2 / 10), "two tokens of request 0 lie in the window"
    assert d.steps == 10
    assert d.step_fill == pytest.approx(10 / 16)


def test_tokens_per_second_of_a_request_include_its_wait(make):
    """1000 tokens, first after 9.9 s, last after 10 s: 100 tokens/s, 9990 without the wait."""
    times = np.linspace(9.9, 10.0, 1000)
    report = build(unified(make, 1), [alone(make, 0, 0.0, times)], [])
    assert report.request_rates.end_to_end_tokens_per_second.p50 == pytest.approx(100)
    assert report.request_rates.decode_only_tokens_per_second.p50 == pytest.approx(9990)
    assert report.latency.ttft_ms.p50 == pytest.approx(9900)
    assert report.latency.end_to_end_ms.p50 == pytest.approx(10_000)
    assert report.whole_run.output_tokens_per_second == pytest.approx(100)
    assert report.window.basis == "whole_run"
    assert report.window.short
    assert report.system.throughput.output.total == pytest.approx(100)


def test_latencies_count_from_the_scheduled_arrival(make):
    requests = [
        alone(make, 0, 0.0, [1.0, 1.1, 1.5], sent=0.8),
        alone(make, 1, 5.0, [5.5], sent=5.0),
    ]
    report = build(unified(make, 1), requests, [])
    assert (report.latency.ttft_ms.count, report.latency.ttft_ms.mean) == (2, pytest.approx(750))
    assert (report.latency.tpot_ms.count, report.latency.tpot_ms.mean) == (1, pytest.approx(250))
    assert (report.latency.itl_ms.count, report.latency.itl_ms.mean) == (2, pytest.approx(250))
    assert report.latency.itl_ms.p50 == pytest.approx(250)
    assert report.latency.itl_ms.p99 == pytest.approx(397)
    assert report.latency.end_to_end_ms.mean == pytest.approx(1000)
    assert report.latency.send_lag_ms.p50 == pytest.approx(400)
    assert any("fell behind" in w for w in report.warnings)


def test_window_ends_with_the_last_arrival(make):
    requests = [
        alone(make, 0, 100.0, [103.0, 105.0, 109.0, 111.0]),
        alone(make, 1, 102.0, [110.0, 112.0]),
        alone(make, 2, 110.0, [113.0, 114.0]),
    ]
    rows = [
        dict(start=s, wall=1.0, prefill_tokens=n)
        for s, n in ((101.0, 5), (103.5, 7), (108.9, 11), (109.5, 13))
    ]
    steps = [make.steps("unified/0", 0, rows)]
    report = build(unified(make, 1, warmup_end=104.0), requests, steps)
    w = report.window
    assert (w.basis, w.start, w.end, w.seconds) == ("arrivals", 4.0, 10.0, 6.0)
    assert w.short
    assert "6.0 s" in w.note
    assert "60 s" in w.note
    assert report.system.throughput.output.total == pytest.approx(3 / 6), "tokens at 105, 109 and 110"
    assert report.system.throughput.new_prefill.total == pytest.approx(18 / 6), (
        "steps that ended at 104.5 and 109.9"
    )
    assert report.requests.in_window == 1
    assert report.latency.ttft_ms.count == 1
    assert report.whole_run.output_tokens == 8
    assert report.whole_run.output_tokens_per_second == pytest.approx(8 / 14)


def test_a_long_window_is_not_called_short(make):
    report = build(*make.run(seconds=61.0))
    assert not report.window.short
    assert not report.warnings


@pytest.mark.parametrize("arrivals", [[0.0, 0.0, 0.0], [0.0, 0.4, 0.9]])
def test_closed_batch_is_reported_over_the_whole_run_and_says_so(make, arrivals):
    requests = [alone(make, i, t, [t + 1.0, t + 2.0]) for i, t in enumerate(arrivals)]
    report = build(unified(make, 1), requests, [])
    assert report.window.basis == "whole_run"
    assert "whole run" in report.window.note
    assert report.window.seconds == pytest.approx(arrivals[-1] + 2.0)
    assert report.system.throughput.output.total == pytest.approx(6 / (arrivals[-1] + 2.0))
    assert report.requests.in_window == 3


def test_goodput_needs_both_objectives(make):
    requests = [
        alone(make, 0, 0.0, [1.9, 1.95]),
        alone(make, 1, 1.0, [3.1, 3.15]),
        alone(make, 2, 2.0, [2.5, 2.7]),
        alone(make, 3, 3.0, [3.5]),
        alone(make, 4, 10.0, [], finish_reason="error", error="no room", output_tokens=0),
    ]
    report = build(unified(make, 1), requests, [])
    g = report.goodput
    assert (g.requests, g.requests_per_second, g.fraction) == (2, pytest.approx(0.2), pytest.approx(0.4))
    assert (report.requests.count, report.requests.finished, report.requests.failed) == (5, 4, 1)
    assert any("1 of 5 requests failed" in w and "no room" in w for w in report.warnings)
    assert report.latency.ttft_ms.count == 4


def test_split_roles_share_the_tokens_of_a_request(make):
    facts, requests, steps = make.run()
    report = build(facts, requests, steps)
    prefill, decode = section(report, "prefill"), section(report, "decode")
    # 19 of the 20 requests produce their 5 tokens before the last arrival.
    assert prefill.throughput.output.total == pytest.approx(19 / 100)
    assert decode.throughput.output.total == pytest.approx(76 / 100)
    assert decode.throughput.new_prefill.total == 0
    assert (prefill.nodes, decode.nodes) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert prefill.throughput.output.per_node_of_role == pytest.approx(3 * 19 / 100)
    assert decode.throughput.output.per_node_of_all == pytest.approx(76 / 100)
    for name in ("new_prefill", "cached_prefill", "output"):
        parts = sum(getattr(d.throughput, name).per_node_of_all for d in report.deployments)
        assert getattr(report.system.throughput, name).per_node_of_all == pytest.approx(parts)
    assert report.system.throughput.new_prefill.total == pytest.approx(8 * 19 / 100)
    assert report.system.throughput.cached_prefill.total == pytest.approx(2 * 19 / 100)
    assert prefill.exchange.dispatched_bytes == 19 * 8 * 512
    assert prefill.exchange.dispatched_bytes_per_token == pytest.approx(512)
    assert (decode.kv.peak_fraction, decode.kv.mean_fraction) == (pytest.approx(0.4), pytest.approx(0.25))
    assert decode.hidden == pytest.approx(0.75)
    assert sum(p.share for p in decode.phases) == pytest.approx(1)
    assert sum(p.seconds_per_step for p in decode.phases) == pytest.approx(decode.mean_step_ms / 1e3)


def test_balancedness_by_hand(make):
    loads = [  # [rank][step] -> rows of the three layers
        [[4, 0, 1], [2, 0, 1], [9, 9, 9]],
        [[4, 0, 3], [6, 0, 1], [1, 1, 1]],
    ]
    rows = [[dict(received_rows=r, start=1.0 + s) for s, r in enumerate(rank)] for rank in loads]
    rows[1][2]["start"] = 99.0  # ends outside the window on one rank only
    steps = [make.steps("unified/0", rank, r) for rank, r in enumerate(rows)]
    requests = [alone(make, 0, 0.0, [1.0]), alone(make, 1, 10.0, [10.5])]
    report = build(unified(make, 2), requests, steps)
    first, second, third = section(report, "unified").balancedness
    assert (first.layer, first.steps, first.mean) == (1, 2, pytest.approx((1 + 4 / 6) / 2))
    assert first.p5 == pytest.approx(4 / 6 + 0.05 * (1 - 4 / 6))
    assert first.of_sum == pytest.approx(8 / 10)
    assert (second.steps, second.mean, second.p5, second.of_sum) == (0, None, None, None)
    assert third.mean == pytest.approx((2 / 3 + 1) / 2)
    assert {m.path for m in report.missing} >= {"deployments.unified.balancedness.1.mean"}


def test_ranks_are_joined_by_step_number_not_by_position(make):
    a = make.steps("unified/0", 0, [dict(step=s, received_rows=[s, 1, 1]) for s in (3, 4, 5)])
    b = make.steps("unified/0", 1, [dict(step=s, received_rows=[10 * s, 1, 1]) for s in (5, 4, 6)])
    left, right = balance.join([a, b])
    assert left.step.tolist() == right.step.tolist() == [4, 5]
    assert right.received_rows[:, 0].tolist() == [40, 50]


def test_a_silent_rank_is_named_and_not_averaged_over(make):
    facts, requests, steps = make.run()
    kept = [s for s in steps if (s.instance, s.rank) != ("decode/0", 2)]
    report = build(facts, requests, kept)
    assert any("decode/0" in w and "0, 1, 3" in w for w in report.warnings)
    assert section(report, "decode").balancedness == ()
    assert section(report, "decode").step_fill is None
    assert section(report, "prefill").balancedness != ()


@pytest.mark.parametrize(
    ("ranks", "row", "hidden", "reason"),
    [
        (1, {}, None, "EP degree is 1"),
        (2, {"transport_busy": math.nan}, None, "did not time"),
        (2, {"transport_busy": 0.0, "transport_waited": 0.0}, None, "no transfer"),
        (2, {"transport_busy": 0.5, "transport_waited": 0.4}, 0.2, None),
    ],
)
def test_hidden_transport(make, ranks, row, hidden, reason):
    steps = [make.steps("unified/0", r, [{**row, "decode_tokens": 1}]) for r in range(ranks)]
    requests = [alone(make, 0, 0.0, [1.0]), alone(make, 1, 10.0, [10.5])]
    report = build(unified(make, ranks), requests, steps)
    if hidden is not None:
        assert section(report, "unified").hidden == pytest.approx(hidden)
        return
    assert section(report, "unified").hidden is None
    assert any(m.path == "deployments.unified.hidden" and reason in m.reason for m in report.missing)


def test_rows_and_steps_by_dispatch_mode(make):
    """All ranks of an instance decide alike: steps are counted once, rows on every rank."""
    modes = (0, 1, 1, 0, 1)
    ranks = [
        make.steps(
            "unified/0",
            rank,
            [dict(decode_tokens=2, dispatch_mode=m, rows_dispatched=3 + rank) for m in modes],
        )
        for rank in range(2)
    ]
    requests = [alone(make, 0, 0.0, [1.0]), alone(make, 1, 10.0, [10.5])]
    d = section(build(unified(make, 2), requests, ranks), "unified")
    assert d.dispatch_modes == {"normal": 2, "low_latency": 3}
    assert (d.exchange.dispatched_rows, d.exchange.dispatched_rows_per_token) == (35, 35 / 20)


def test_unmeasured_bytes_are_null(make):
    steps = [make.steps("unified/0", 0, [dict(decode_tokens=1), dict(decode_tokens=1, bytes_dispatched=-1)])]
    requests = [alone(make, 0, 0.0, [1.0]), alone(make, 1, 10.0, [10.5])]
    d = section(build(unified(make, 1), requests, steps), "unified")
    assert d.exchange.dispatched_bytes is None
    assert d.exchange.combined_bytes == 0


def nulls(value, path=""):
    """Paths of all nulls, deployments by name."""
    if value is None:
        return {path}
    if isinstance(value, dict):
        return set().union(*(nulls(v, f"{path}.{k}" if path else k) for k, v in value.items()), set())
    if isinstance(value, list | tuple):
        keys = [v["name"] if isinstance(v, dict) and "throughput" in v else i for i, v in enumerate(value)]
        return set().union(*(nulls(v, f"{path}.{k}") for k, v in zip(keys, value, strict=True)), set())
    return set()


def without_timelines(report):
    """The columns of timelines taken out, timelines that are null left in."""
    cut = [
        msgspec.structs.replace(d, timeline=d.timeline and msgspec.structs.replace(d.timeline, **empty))
        for d in report.deployments
        for empty in [dict.fromkeys(schema_time.Timeline.__struct_fields__[1:], ())]
    ]
    return msgspec.structs.replace(report, deployments=tuple(cut))


def test_every_null_has_a_reason_and_every_reason_a_null(make):
    facts, requests, steps = make.run()
    failed = [make.request(0, 0.0, [], finish_reason="error", error="refused", sent=None)]
    late = [make.request(0, 0.0, [0.5]), make.request(1, 50.0, [90.0])]
    empty = [s.select(s.step < 0) for s in steps]
    nan = [make.steps("prefill/0", 0, [dict(kv_used_blocks=-1, transport_busy=math.nan, bytes_combined=-1)])]
    unknown = msgspec.structs.replace(facts.machine, cpu_model=None, cores=None, memory_bytes=None)
    cases = [
        (facts, requests, steps),
        (make.facts(commit=None, machine=unknown), requests, []),
        (facts, [*failed, make.request(1, 5.0, [6.0, 7.0], finish_reason="error", error="x")], steps),
        (facts, late, empty),
        (facts, late, nan),
    ]
    for case in cases:
        report = build(*case)
        # The plan is the user's; a null of the log is something that did not happen, and one in a
        # timeline's column a bucket without steps.
        report = without_timelines(msgspec.structs.replace(report, plan={}, request_log=()))
        found = nulls(msgspec.to_builtins(report))
        assert found == {m.path for m in report.missing}
        assert len(report.missing) == len(found)
        assert b"NaN" not in msgspec.json.encode(report)
        assert nulls(msgspec.json.decode(msgspec.json.encode(report))) == found, "no NaN became null"


def test_log_of_requests_counts_from_the_first_arrival(make):
    requests = [
        alone(make, 0, 100.0, [101.0, 103.0], sent=100.5),
        alone(make, 1, 110.0, [], finish_reason="error", error="no room", sent=None, output_tokens=0),
    ]
    first, second = build(unified(make, 1), requests, []).request_log
    assert (first.arrival, first.sent, first.first_token, first.last_token) == (0.0, 0.5, 1.0, 3.0)
    assert (first.prompt_tokens, first.output_tokens, first.finish_reason) == (10, 2, "length")
    assert (second.arrival, second.sent, second.first_token, second.last_token) == (10.0, None, None, None)
    assert (second.error, second.finish_reason) == ("no room", "error")


def test_a_run_in_which_nothing_was_served_says_why(make):
    refused = alone(make, 0, 100.0, [], finish_reason="error", error="HTTP 429", sent=100.0, output_tokens=0)
    with pytest.raises(MoeRuntimeError, match="no request was served, .*; the first request: HTTP 429"):
        build(unified(make, 1), [refused], [])


def test_phases_that_do_not_add_up_are_warned_of(make):
    rows = [dict(wall=1.0, phases=[0.1] * 7)]
    requests = [alone(make, 0, 0.0, [1.0]), alone(make, 1, 10.0, [10.5])]
    report = build(unified(make, 1), requests, [make.steps("unified/0", 0, rows)])
    assert any("phases sum to 0.700 s" in w for w in report.warnings)


def test_prompt_tokens_are_counted_two_ways(make):
    facts, requests, steps = make.run()
    assert not any("in doubt" in w for w in build(facts, requests, steps).warnings)
    twice = [dataclasses.replace(s, prefill_tokens=2 * s.prefill_tokens) for s in steps]
    assert any("in doubt" in w for w in build(facts, requests, twice).warnings)


def test_recomputed_tokens_are_no_throughput(make):
    rows = [dict(prefill_tokens=10), dict(recomputed_tokens=6, preemptions=1, bytes_dispatched=32)]
    requests = [alone(make, 0, 0.0, [1.0]), alone(make, 1, 10.0, [10.5], prompt=0)]
    report = build(unified(make, 1), requests, [make.steps("unified/0", 0, rows)])
    d = section(report, "unified")
    assert d.throughput.new_prefill.total == pytest.approx(1.0)
    assert (d.recomputed_tokens, d.preemptions, report.requests.preemptions) == (6, 1, 1)
    assert d.exchange.dispatched_bytes_per_token == pytest.approx(2.0)
    assert any("1 preemptions in unified" in w for w in report.warnings)


def test_batches_of_a_rank_are_joined_and_wrong_ones_refused(make):
    facts, requests, steps = make.run()
    halves = [s.select(s.step < 7) for s in steps] + [s.select(s.step >= 7) for s in steps]
    assert build(facts, requests, halves) == build(facts, requests, steps)
    with pytest.raises(ValueError, match="step 0 twice"):
        build(facts, requests, [*steps, steps[0]])
    with pytest.raises(ValueError, match="decode/7"):
        build(facts, requests, [make.steps("decode/7", 0, [])])
    with pytest.raises(ValueError, match="2 MoE layers"):
        build(facts, requests, [make.steps("decode/0", 0, [], layers=2)])
    with pytest.raises(ValueError, match="at least one request"):
        build(facts, [], steps)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 80), st.integers(0, 40), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_totals_are_the_sums_of_their_parts(make, rows):
    """Whatever ran where: deployments add up to the system, ranks to their deployment."""
    facts = make.facts()
    batches: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number, (start, tokens, rank, decode) in enumerate(rows):
        key = ("decode/0", rank) if decode else ("prefill/0", rank % 2)
        batches.setdefault(key, []).append(
            dict(step=number, start=start, prefill_tokens=tokens, cached_tokens=tokens // 3)
        )
    steps = [make.steps(instance, rank, r) for (instance, rank), r in batches.items()]
    requests = [make.request(0, 0.0, [1.0, 2.0]), make.request(1, 60.0, [61.0])]
    report = build(facts, requests, steps)
    inside = sum(tokens for start, tokens, _, _ in rows if start + 0.1 <= 60.0)
    assert report.system.throughput.new_prefill.total == pytest.approx(inside / 60)
    for name in ("new_prefill", "cached_prefill"):
        by_rank = sum(getattr(r, f"{name}_tokens_per_second") for d in report.deployments for r in d.per_rank)
        assert getattr(report.system.throughput, name).total == pytest.approx(by_rank)


def test_rank_loads_before_and_after_experts_moved(make):
    loads = [[[6, 1, 1], [6, 1, 1], [4, 1, 1]], [[2, 1, 1], [2, 1, 1], [4, 1, 3]]]
    ranks = [
        make.steps(
            "unified/0",
            rank,
            [dict(received_rows=rows, placement_epoch=int(s == 2)) for s, rows in enumerate(steps)],
        )
        for rank, steps in enumerate(loads)
    ]
    requests = [alone(make, 0, 0.0, [1.0]), alone(make, 1, 10.0, [10.5])]
    found = section(build(unified(make, 2), requests, ranks), "unified").rank_loads
    assert found.before == ((1.5, 0.5), (1.0, 1.0), (1.0, 1.0))
    assert found.after == ((1.0, 1.0), (1.0, 1.0), (0.5, 1.5))
    still = [r.select(r.step < 2) for r in ranks]
    report = build(unified(make, 2), requests, still)
    assert section(report, "unified").rank_loads.after == found.before
    assert {m.path: m.reason for m in report.missing}["deployments.unified.rank_loads.before"] == (
        "experts did not move in the window"
    )


def test_timeline_shares_work_out_by_time(make):
    """Ten seconds in 200 buckets of 50 ms; a step of a second fills twenty."""
    rows = [
        dict(start=1.0, wall=1.0, prefill_tokens=40, kv_used_blocks=50),
        dict(start=2.0, wall=0.025, decode_tokens=4, kv_used_blocks=10),
        dict(start=2.025, wall=0.025, decode_tokens=2, kv_used_blocks=30),
    ]
    requests = [alone(make, 0, 0.0, [2.0, 2.05]), alone(make, 1, 10.0, [])]
    t = section(build(unified(make, 1), requests, [make.steps("unified/0", 0, rows)]), "unified").timeline
    assert t.bucket_seconds == pytest.approx(0.05)
    assert t.prefill_tokens_per_second[20:40] == pytest.approx([40.0] * 20)
    assert sum(t.prefill_tokens_per_second) * 0.05 == pytest.approx(40)
    assert t.decode_rows_per_second[40] == pytest.approx(6 / 0.05)
    assert (t.batch[40], t.kv_fraction[40], t.kv_fraction[30]) == pytest.approx((3, 0.2, 0.5))
    assert (t.batch[0], t.batch[41], t.active_fraction[30], t.active_fraction[41]) == (
        None,
        None,
        pytest.approx(1),
        0,
    )
    assert t.queue[:40] == pytest.approx([1.0] * 40)
    assert sum(t.queue[40:]) == pytest.approx(0, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), max_size=20))
def test_weighted_percentiles_are_those_of_repeated_values(pairs):
    values, counts = np.array([v for v, _ in pairs]), np.array([n for _, n in pairs], np.int64)
    ours, theirs = weighted_percentiles(values, counts), percentiles(np.repeat(values, counts))
    assert (ours is None) == (theirs is None)
    if ours is not None:
        for name in ours.__struct_fields__:
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-9)
