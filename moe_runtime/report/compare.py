"""Several reports side by side: one column per run, key figures only."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from moe_runtime.report.schema import Deployment, Percentiles, Report
from moe_runtime.report.show import (
    WIDTH,
    bullets,
    number,
    percent,
    plural,
    short_commit,
    table,
    titled,
    to_text,
)

Row = tuple[str, Callable[[Report], str]]
_COLUMNS_PER_TABLE = 4


def render_many(reports: Sequence[tuple[str, Report]], *, color: bool = False, width: int = WIDTH) -> str:
    """Named reports as one table, continued below when there are more than fit; `width` columns at most."""
    parts: list[RenderableType] = []
    rows = _rows([report for _, report in reports])
    for start in range(0, len(reports), _COLUMNS_PER_TABLE):
        shown = reports[start : start + _COLUMNS_PER_TABLE]
        title = f"Runs {start + 1} to {start + len(shown)} of {len(reports)}"
        grid = table(["", *(name for name, _ in shown)], color=color)
        for label, value in rows:
            grid.add_row(label, *(value(report) for _, report in shown))
        parts.append(titled(title, grid, color=color))
    notes = differences([report for _, report in reports])
    return to_text([*parts, bullets("Warnings", notes, width)], color=color, width=width)


def _rows(reports: Sequence[Report]) -> list[Row]:
    rows: list[Row] = [
        ("created", lambda r: r.created),
        ("commit", lambda r: short_commit(r.commit)),
        ("plan", lambda r: r.plan_digest),
        ("nodes, ranks", lambda r: f"{plural(round(r.system.nodes, 2), 'node')}, {r.system.ranks}"),
        ("window, s", lambda r: number(r.window.seconds) + (" (short)" if r.window.short else "")),
        ("output tokens/s per node of all", lambda r: number(r.system.throughput.output.per_node_of_all)),
        ("new prefill, same", lambda r: number(r.system.throughput.new_prefill.per_node_of_all)),
        ("cached prefill, same", lambda r: number(r.system.throughput.cached_prefill.per_node_of_all)),
        ("TTFT p50 / p99, ms", lambda r: _two(r.latency.ttft_ms)),
        ("TPOT p50 / p99, ms", lambda r: _two(r.latency.tpot_ms)),
        ("end to end p50 / p99, ms", lambda r: _two(r.latency.end_to_end_ms)),
        ("goodput, requests/s", lambda r: number(r.goodput.requests_per_second)),
        ("requests failed", lambda r: f"{r.requests.failed} of {r.requests.count}"),
    ]
    for name in dict.fromkeys(d.name for r in reports for d in r.deployments):
        rows += _deployment_rows(name)
    return rows


def _deployment_rows(name: str) -> list[Row]:
    def of(value: Callable[[Deployment], str]) -> Callable[[Report], str]:
        return lambda r: next((value(d) for d in r.deployments if d.name == name), "-")

    return [
        (f"{name}: instances x EP", of(lambda d: f"{len(d.instances)} x {d.expert_parallel}")),
        ("  output per node of its role", of(lambda d: number(d.throughput.output.per_node_of_role))),
        ("  new prefill, same", of(lambda d: number(d.throughput.new_prefill.per_node_of_role))),
        ("  mean step, ms", of(lambda d: number(d.mean_step_ms))),
        ("  worst layer's balancedness", of(_worst)),
        ("  transport time hidden", of(lambda d: percent(d.hidden))),
    ]


def _worst(d: Deployment) -> str:
    return number(min((b.mean for b in d.balancedness if b.mean is not None), default=None))


def _two(row: Percentiles | None) -> str:
    return "n/a" if row is None else f"{number(row.p50)} / {number(row.p99)}"


def differences(reports: Sequence[Report]) -> list[str]:
    """What makes the columns hard to compare."""
    checks: list[Row] = [
        ("machines", lambda r: f"{r.machine.hardware} {r.machine.cpu_model} {r.machine.cores}"),
        ("models", lambda r: repr(r.model)),
        ("traces or trace options", lambda r: repr(r.options)),
        ("objectives of the goodput", lambda r: f"{r.goodput.ttft_slo_ms} {r.goodput.tpot_slo_ms}"),
    ]
    notes = [
        f"The {what} of these runs differ." for what, key in checks if len({key(r) for r in reports}) > 1
    ]
    if any(r.window.basis == "whole_run" for r in reports) and any(
        r.window.basis == "arrivals" for r in reports
    ):
        notes.append("Some rates are over the whole run, others over the window of arrivals.")
    return notes
