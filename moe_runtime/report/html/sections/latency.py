"""What clients saw: distributions of latencies, rates of single requests, goodput."""

from collections.abc import Sequence

from moe_runtime.report.html.axes import legend, panel
from moe_runtime.report.html.figures import Run, count
from moe_runtime.report.html.lines import Curve, distribution_chart
from moe_runtime.report.html.markup import Html, el, join
from moe_runtime.report.html.parts import color, run_heading, run_name, section
from moe_runtime.report.html.tables import name, table
from moe_runtime.report.schema import RequestRow
from moe_runtime.report.show import percent

_CHARTS = {
    "ttft_ms": ("Time to first token (TTFT)", "from the scheduled arrival"),
    "tpot_ms": ("Time per output token (TPOT)", "after the first, by request"),
    "end_to_end_ms": ("End to end", "from the scheduled arrival"),
}
_ROWS = {
    ("latency", "ttft_ms"): "TTFT, ms",
    ("latency", "tpot_ms"): "TPOT, ms",
    ("latency", "itl_ms"): "between tokens (ITL), ms",
    ("latency", "end_to_end_ms"): "end to end, ms",
    ("latency", "send_lag_ms"): "sent late by, ms",
    ("request_rates", "end_to_end_tokens_per_second"): "one request's output, tokens/s",
    ("request_rates", "decode_only_tokens_per_second"): "the same without its TTFT, tokens/s",
}
_OBJECTIVES = {"ttft_ms": "ttft_slo_ms", "tpot_ms": "tpot_slo_ms"}
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_COLUMNS = ("count", "mean", *_SHARES)


def latency(runs: Sequence[Run]) -> Html:
    charts = [
        panel(title, f"ms, {what}", _chart(runs, field, title))
        for field, (title, what) in _CHARTS.items()
        if any(run.value("latency", field) for run in runs)
    ]
    key = legend([(color(run.index), run_name(run)) for run in runs]) if len(runs) > 1 else None
    tables = [part for run in runs for part in (run_heading(run, runs), _table(run), _goodput(run))]
    text = el(
        "p",
        "Curves: share of the requests of the window that took at most so long, as far as the axis goes."
        " Circles: median, p90 and p99. Dashed: the objective of the plan.",
        class_="dim small",
    )
    return section("latency", "Latency", el("div", *charts, class_="panels"), key, text, join(tables))


def _chart(runs: Sequence[Run], field: str, title: str) -> Html:
    curves = []
    for run in runs:
        if run.value("latency", field) is None:
            continue
        marked = [
            (
                share,
                run.value("latency", field, p),
                join([f"{p}: {run.shown('latency', field, p)}"]),
                run.marks("latency", field, p),
            )
            for p, share in _SHARES.items()
        ]
        curves.append(Curve(color=color(run.index), values=_values(run, field), marked=marked))
    limits = {run.value("goodput", _OBJECTIVES[field]) for run in runs} if field in _OBJECTIVES else set()
    limit = limits.pop() if len(limits) == 1 else None
    return distribution_chart(f"{title}: distribution over requests", curves, unit="ms", limit=limit)


def _values(run: Run, field: str) -> list[float]:
    """Of the requests whose percentiles are reported, in rising order."""
    window = run.report.window
    found = (
        _value(r, field)
        for r in run.report.request_log
        if window.start - 1e-6 <= r.arrival <= window.end + 1e-6
        and r.error is None
        and r.finish_reason in ("stop", "length")
    )
    return sorted(v for v in found if v is not None)


def _value(r: RequestRow, field: str) -> float | None:
    if r.first_token is None or r.last_token is None:
        return None
    if field == "ttft_ms":
        return 1e3 * (r.first_token - r.arrival)
    if field == "end_to_end_ms":
        return 1e3 * (r.last_token - r.arrival)
    return 1e3 * (r.last_token - r.first_token) / (r.output_tokens - 1) if r.output_tokens > 1 else None


def _table(run: Run) -> Html:
    rows = [
        (
            name(shown),
            *(run.figure(*at, c, tag="td", **({"form": count} if c == "count" else {})) for c in _COLUMNS),  # type: ignore[arg-type]
        )
        for at, shown in _ROWS.items()
    ]
    return table(("", *_COLUMNS), rows)


def _goodput(run: Run) -> Html:
    return el(
        "p",
        "Goodput: ",
        run.figure("goodput", "requests_per_second"),
        " requests/s, ",
        run.figure("goodput", "fraction", form=percent),
        " of the ",
        run.figure("requests", "in_window", form=count),
        " requests of the window: finished, with a TTFT of at most ",
        run.figure("goodput", "ttft_slo_ms"),
        " ms and a TPOT of at most ",
        run.figure("goodput", "tpot_slo_ms"),
        " ms. Of ",
        run.figure("requests", "count", form=count),
        " requests in all, ",
        run.figure("requests", "failed", form=count),
        " failed.",
    )
