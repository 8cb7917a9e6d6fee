"""What /metrics says: every rank for itself, every token once, and every name the dashboard asks for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_runtime.engine.messages import ROWS_BUCKETS, RankTotals, Status
from moe_runtime.frontend.admission import Admission, derive_limits
from moe_runtime.frontend.board import STALE_SECONDS, WINDOW_SECONDS, Board
from moe_runtime.frontend.metrics import Metrics
from moe_runtime.report.records import PHASES

DASHBOARD = Path(__file__).resolve().parents[2] / "configs" / "grafana-dashboard.json"
STATUS_FIELDS = set(Status.__struct_fields__)


def status(rank: int, *, deployment: str = "unified", **changes) -> Status:
    values: dict[str, Any] = {
        "instance": f"{deployment}-0",
        "deployment": deployment,
        "rank": rank,
        "time": 1.0,
        "step": 1,
        "waiting": 0,
        "waiting_tokens": 0,
        "running": 0,
        "pulling": 0,
        "kv_blocks": 64,
        "kv_used": 0,
        "kv_cached": 0,
        "block_tokens": 16,
        "others_tokens": 0,
        "others_requests": 0,
        "chunk_tokens": 256,
    }
    totals: dict[str, Any] = {k: v for k, v in changes.items() if k not in STATUS_FIELDS}
    values |= {k: v for k, v in changes.items() if k in STATUS_FIELDS}
    totals.setdefault("phase_seconds", [0.0] * len(PHASES))
    totals.setdefault("rows_histogram", [0] * (len(ROWS_BUCKETS) + 1))
    return Status(**values, totals=RankTotals(**totals))


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return read(metrics.render())


def by_rank(metrics: Metrics, name: str, **labels: str) -> dict[str, float]:
    return {
        dict(key)["rank"]: value
        for (found, key), value in samples(metrics).items()
        if found == name and labels.items() <= dict(key).items()
    }


def test_every_rank_publishes_its_own_numbers():
    metrics = Metrics(Board(), ranks_per_node=4)
    for rank in range(4):
        metrics.observe_status(status(rank, running=rank + 1, waiting=rank), now=1.0)
    gauges = by_rank(metrics, "moe_runtime_requests_running")
    assert gauges == {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0}
    assert sum(gauges.values()) == 10.0
    assert sum(by_rank(metrics, "moe_runtime_requests_waiting").values()) == 6.0


def read(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(text.decode()))
    assert len({f.name for f in families}) == len(families), "a family is written once"
    every = [((s.name, tuple(sorted(s.labels.items()))), s.value) for f in families for s in f.samples]
    assert len(dict(every)) == len(every), "a sample is written once"
    return dict(every)


def test_every_frontend_says_the_same_of_all_of_them():
    """Latencies add up over the frontends; tokens, which all ranks tell all frontends, are counted once."""
    both = [Metrics(Board(), ranks_per_node=2, frontend=n, frontends=2) for n in range(2)]
    prefill = status(
        0, deployment="prefill", new_prefill_tokens=88, cached_prefill_tokens=12, output_tokens=1
    )
    decode = status(0, deployment="decode", output_tokens=19)
    later = status(0, deployment="decode", output_tokens=25, time=2.0)
    for number, message in ((0, prefill), (0, decode), (1, prefill), (1, later)):
        both[number].observe_status(message, now=1.0)
    for number, ttft in ((0, 0.2), (1, 0.4), (1, 0.6)):
        both[number].observe_first_token(ttft=ttft, queue=0.1)
        both[number].observe_finished(finish_reason="stop", seconds=1.0, prompt_tokens=8, output_tokens=2)
    exports = {n: metrics.export() for n, metrics in enumerate(both)}
    got = read(both[0].render(exports))
    assert read(both[1].render(exports)) == got, "a scrape may meet either"

    def total(name: str, **labels: str) -> float:
        return sum(
            v for (n, k), v in got.items() if n == f"moe_runtime_{name}" and labels.items() <= dict(k).items()
        )

    assert total("time_to_first_token_seconds_count") == 3
    assert total("time_to_first_token_seconds_sum") == pytest.approx(1.2)
    assert total("time_to_first_token_seconds_bucket", le="0.25") == 1
    assert total("requests_total", finish_reason="stop") == 3
    assert total("requests_total", frontend="1") == 2
    tokens = {
        k: total("tokens_total", kind=k) for k in ("new_prefill", "cached_prefill", "recomputed", "output")
    }
    assert tokens == {"new_prefill": 88, "cached_prefill": 12, "recomputed": 0, "output": 20}
    assert total("frontend_up") == 2


def test_a_silent_frontend_is_named_and_the_ranks_are_not_lost_with_it():
    second = Metrics(Board(), ranks_per_node=2, frontend=1, frontends=2)
    second.observe_status(status(0, output_tokens=19), now=1.0)
    got = read(second.render({1: second.export()}))
    assert got["moe_runtime_frontend_up", (("frontend", "0"),)] == 0
    assert got["moe_runtime_frontend_up", (("frontend", "1"),)] == 1
    assert sum(v for (n, _), v in got.items() if n == "moe_runtime_tokens_total") == 19


def test_requests_as_this_frontend_saw_them():
    admission = Admission(
        derive_limits(
            decode_ranks=1,
            rank_kv_tokens=1000,
            rank_sequences=4,
            prefill_kv_tokens=1000,
            max_positions=500,
            ttft_seconds=2.0,
        )
    )
    metrics = Metrics(Board(), ranks_per_node=1, admission=admission)
    metrics.observe_verdict(admission.offer(1, prompt_tokens=8, max_tokens=8, now=0.0))
    metrics.observe_verdict(admission.offer(2, prompt_tokens=600, max_tokens=8, now=0.0))
    metrics.observe_first_token(ttft=0.2, queue=0.05)
    metrics.observe_token(gap=0.02)
    metrics.observe_finished(finish_reason="stop", seconds=0.5, prompt_tokens=8, output_tokens=2)
    got, me = samples(metrics), ("frontend", "0")
    assert got["moe_runtime_requests_refused_total", (me, ("status", "400"))] == 1
    assert got["moe_runtime_requests_total", (("finish_reason", "stop"), me)] == 1
    assert got["moe_runtime_time_to_first_token_seconds_sum", (me,)] == 0.2
    assert got["moe_runtime_queue_seconds_sum", (me,)] == 0.05
    assert got["moe_runtime_inter_token_latency_seconds_count", (me,)] == 1
    assert got["moe_runtime_frontend_requests", (me,)] == 1
    assert got["moe_runtime_frontend_tokens", (me,)] == 16


def test_rates_fill_and_balance_are_those_of_the_window():
    board = Board()
    metrics = Metrics(board, ranks_per_node=4)
    for time, scale in ((0.0, 0), (WINDOW_SECONDS, 10), (2 * WINDOW_SECONDS, 12)):
        for rank, rows in ((0, [30, 10]), (1, [10, 10])):
            message = status(
                rank,
                time=time,
                steps=scale,
                step_fill=0.5 * scale,
                output_tokens=100 * scale,
                received_rows=[scale * r for r in rows],
            )
            metrics.observe_status(message, now=time)
    got = samples(metrics)
    assert got["moe_runtime_step_fill", (("instance", "unified-0"),)] == 0.5
    assert got["moe_runtime_balancedness", (("instance", "unified-0"),)] == pytest.approx((20 / 30 + 1) / 2)
    # Two ranks of half a node made 2 x 100 x 2 tokens in the newest 10 s.
    key = (("deployment", "unified"), ("kind", "output"))
    assert got["moe_runtime_tokens_per_second_per_node", key] == pytest.approx(2 * 400 / WINDOW_SECONDS)


def test_step_sizes_are_a_histogram():
    counts = [0] * (len(ROWS_BUCKETS) + 1)
    counts[0], counts[3], counts[-1] = 5, 2, 1
    metrics = Metrics(Board(), ranks_per_node=1)
    metrics.observe_status(status(0, rows_histogram=counts, decode_rows=21, prefill_rows=5000), now=0.0)
    rank = (("deployment", "unified"), ("instance", "unified-0"))
    got = samples(metrics)
    for bound, count in (("1.0", 5), ("4.0", 5), ("8.0", 7), ("4096.0", 7), ("+Inf", 8)):
        key = (rank[0], rank[1], ("le", bound), ("rank", "0"))
        assert got["moe_runtime_step_rows_bucket", key] == count
    assert got["moe_runtime_step_rows_sum", (*rank, ("rank", "0"))] == 5021


def test_steps_are_counted_by_dispatch_mode_and_overlap_reason():
    metrics = Metrics(Board(), ranks_per_node=1)
    metrics.observe_status(status(3, dispatch_modes=[4, 9], overlap_reasons=[0, 0, 7, 5, 1]), now=0.0)
    for name, label, values in (
        ("dispatch_mode", "mode", {"normal": 4, "low_latency": 9}),
        ("overlap_reason", "reason", {"off": 0, "asked": 0, "gain": 7, "no_gain": 5, "too_small": 1}),
    ):
        for kind, value in values.items():
            found = by_rank(metrics, f"moe_runtime_steps_by_{name}_total", **{label: kind})
            assert found == {"3": value}


def test_silent_ranks_are_named():
    board = Board([("decode-0", 0), ("decode-0", 1)])
    board.observe(status(0, deployment="decode"), now=100.0)
    assert board.stale(now=100.0) == ["decode-0 rank 1"]
    assert board.stale(now=101.0 + STALE_SECONDS) == ["decode-0 rank 0", "decode-0 rank 1"]


def test_every_metric_of_the_dashboard_exists():
    metrics = Metrics(Board(), ranks_per_node=1, admission=Admission(LIMITS))
    metrics.observe_status(status(0, steps=1, received_rows=[1]), now=0.0)
    metrics.observe_status(status(0, time=2.0, steps=2, received_rows=[2]), now=2.0)
    metrics.observe_finished(finish_reason="stop", seconds=1.0, prompt_tokens=1, output_tokens=1)
    metrics.observe_verdict(Admission(LIMITS).offer(0, prompt_tokens=9999, max_tokens=1, now=0.0))
    known = {name for name, _ in samples(metrics)}
    expressions = [
        t["expr"] for p in json.loads(DASHBOARD.read_text())["panels"] for t in p.get("targets", [])
    ]
    assert len(expressions) >= 12
    asked = {name for e in expressions for name in re.findall(r"\bmoe_runtime_\w+", e)}
    assert asked
    assert asked <= known, asked - known


LIMITS = derive_limits(
    decode_ranks=1,
    rank_kv_tokens=1000,
    rank_sequences=4,
    prefill_kv_tokens=1000,
    max_positions=500,
    ttft_seconds=2.0,
)
