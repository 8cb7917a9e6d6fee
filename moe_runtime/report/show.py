"""A report as text for people: throughput per node first, every denominator named.

Formatting only: all numbers come from the Report as they are. Null is shown as "n/a", and the
reasons stand at the end.
"""

import os
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_runtime.report.schema import Deployment, Percentiles, Rate, Report, Throughput
from moe_runtime.report.show_time import fill_rebalances, fill_time_use

WIDTH = 100
_WORST_LAYERS = 3
# A rule under the header and nothing else, in characters every terminal and log has.
_PLAIN = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def render(report: Report, *, color: bool = False, width: int = WIDTH) -> str:
    """One report as text of at most `width` columns."""
    parts = [_head(report), _throughput(report, color), _deployments(report, color), _latency(report, color)]
    parts += [
        _phases(report, color),
        _time_use(report, color),
        _balance(report, color),
        _rebalances(report, color),
    ]
    parts += [
        bullets("Warnings", report.warnings, width),
        bullets("Not available (n/a)", _reasons(report), width),
    ]
    return to_text(parts, color=color, width=width)


def use_color(stream: TextIO) -> bool:
    """Colour and line-drawing characters: only on a terminal, and not if NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def to_text(parts: Sequence[RenderableType], *, color: bool, width: int) -> str:
    """Lay renderables out below each other; trailing blanks of a line are cut."""
    out = StringIO()
    # Names of files and models are text, not markup.
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n")) + "\n"


def table(columns: Sequence[str], *, color: bool) -> Table:
    """An empty table: first column left, the others right aligned."""
    grid = Table(
        header_style="bold" if color else "",
        box=box.SIMPLE_HEAD if color else _PLAIN,
        show_edge=False,
        pad_edge=False,
    )
    for index, name in enumerate(columns):
        grid.add_column(name, justify="right" if index else "left", overflow="fold")
    return grid


def titled(title: str, grid: Table, *, color: bool, below: str = "") -> RenderableType:
    """A table under its title; nothing if it has no rows."""
    if not grid.row_count:
        return Group()
    parts: list[RenderableType] = [Text(f"\n{title}", style="bold" if color else ""), grid]
    return Group(*parts, Text(below)) if below else Group(*parts)


def bullets(title: str, sentences: Sequence[str], width: int) -> RenderableType:
    """Sentences under a title; nothing if there are none."""
    if not sentences:
        return Group()
    lines = [textwrap.fill(s, width, initial_indent="- ", subsequent_indent="  ") for s in sentences]
    return Text("\n".join(["", title, *lines]))


def number(value: float | None) -> str:
    """About three significant digits, thousands separated."""
    if value is None:
        return "n/a"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    rounded = float(f"{value:.3g}")
    if rounded == 0:
        return "0"
    digits = 0 if abs(rounded) >= 100 else 1 if abs(rounded) >= 10 else 2 if abs(rounded) >= 1 else 3
    return f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


def plural(count: float, word: str) -> str:
    return f"{count:g} {word}" + ("" if count == 1 else "s")


def role(d: Deployment) -> str:
    """`decode (EP 4, 0.67 nodes)`."""
    return f"{d.name} (EP {d.expert_parallel}, {plural(round(d.nodes, 2), 'node')})"


def short_commit(commit: str | None) -> str:
    """Twelve digits, and the `+` of a changed tree."""
    return "unknown" if commit is None else commit[:12] + "+" * commit.endswith("+")


def _head(report: Report) -> Text:
    r, m = report, report.model
    machine = f"{r.machine.cpu_model or 'unknown processor'}, {number(r.machine.cores)} cores"
    machine = "simulated" if r.simulated else machine
    lines = [
        f"{m.path} ({m.family}, {m.dtype}, {m.num_moe_layers} MoE layers of {m.num_experts} experts)",
        f"plan {r.plan_digest}, moe-runtime {r.version}, commit {short_commit(r.commit)}, {r.created}",
        f"hardware {r.machine.hardware}: {machine}",
        f"trace {r.options.trace} at speed {r.options.speed:g}, lengths x {r.options.scale_lengths:g}",
        f"{plural(r.requests.count, 'request')}: {r.requests.finished} finished, {r.requests.failed} failed,"
        f" {r.requests.preemptions} preemptions",
        r.window.note,
    ]
    return Text("\n".join(lines))


def _throughput(report: Report, color: bool) -> RenderableType:
    grid = table(["", "output", "new prefill", "cached prefill"], color=color)

    def row(name: str, of: Throughput, pick: Callable[[Rate], float]) -> None:
        grid.add_row(name, *(number(pick(rate)) for rate in (of.output, of.new_prefill, of.cached_prefill)))

    nodes = plural(round(report.system.nodes, 2), "node")
    row(f"all, per node of all ({nodes})", report.system.throughput, lambda r: r.per_node_of_all)
    for d in report.deployments:
        nodes = plural(round(d.nodes, 2), "node")
        row(f"{d.name}, per node of {d.name} ({nodes})", d.throughput, lambda r: r.per_node_of_role)
    return titled("Throughput per node, tokens/s", grid, color=color)


def kernels_as_text(modules: Mapping[str, str]) -> str:
    """The implementation of most operations, and the operations that another one ran."""
    if not modules:
        return "none"
    columns = {operation: module.rpartition(".")[2] for operation, module in modules.items()}
    [(usual, _)] = Counter(columns.values()).most_common(1)
    others = [f"{operation} {column}" for operation, column in columns.items() if column != usual]
    return ", ".join([usual, *others])


def _deployments(report: Report, color: bool) -> RenderableType:
    grid = table(["", *(role(d) for d in report.deployments)], color=color)

    def row(name: str, value: Callable[[Deployment], str]) -> None:
        grid.add_row(name, *(value(d) for d in report.deployments))

    row("instances x ranks", lambda d: f"{len(d.instances)} x {d.expert_parallel}")
    row("redundant experts", lambda d: str(d.redundant_experts))
    row("dispatch backend", lambda d: d.dispatch_backend)
    row("kernels", lambda d: kernels_as_text(d.kernels))
    for name, pick in (
        ("output", lambda t: t.output),
        ("new prefill", lambda t: t.new_prefill),
        ("cached prefill", lambda t: t.cached_prefill),
    ):
        row(f"{name}, tokens/s", lambda d, pick=pick: number(pick(d.throughput).total))  # type: ignore[misc]
        row("  per rank", lambda d, pick=pick: number(pick(d.throughput).per_rank))  # type: ignore[misc]
        row("  per node of all", lambda d, pick=pick: number(pick(d.throughput).per_node_of_all))  # type: ignore[misc]
    row("steps", lambda d: number(d.steps))
    row("mean step, ms", lambda d: number(d.mean_step_ms))
    row("step fill", lambda d: percent(d.step_fill))
    row(
        "KV blocks used, peak / mean",
        lambda d: f"{percent(d.kv.peak_fraction)} / {percent(d.kv.mean_fraction)}",
    )
    row("preemptions", lambda d: number(d.preemptions))
    row(
        "steps by dispatch mode", lambda d: ", ".join(f"{m} {number(n)}" for m, n in d.dispatch_modes.items())
    )
    row("dispatched, rows per token", lambda d: number(d.exchange.dispatched_rows_per_token))
    row("dispatched, bytes per token", lambda d: number(d.exchange.dispatched_bytes_per_token))
    row("combined, bytes per token", lambda d: number(d.exchange.combined_bytes_per_token))
    row("transport time hidden", lambda d: percent(d.hidden))
    row("steps in two micro-batches", lambda d: percent(d.overlap.overlapped_fraction))
    return titled("Deployments", grid, color=color)


def _latency(report: Report, color: bool) -> RenderableType:
    grid = table(["", "mean", "p50", "p90", "p99"], color=color)
    latency = report.latency
    for name, row in (
        ("time to first token (TTFT)", latency.ttft_ms),
        ("time per output token (TPOT)", latency.tpot_ms),
        ("between tokens (ITL)", latency.itl_ms),
        ("end to end", latency.end_to_end_ms),
    ):
        grid.add_row(name, *percentile_cells(row))
    goodput, rates = report.goodput, report.request_rates
    lines = (
        f"Goodput: {number(goodput.requests_per_second)} requests/s,"
        f" {percent(goodput.fraction)} of the requests met TTFT <= {goodput.ttft_slo_ms:g} ms and"
        f" TPOT <= {goodput.tpot_slo_ms:g} ms.\n"
        f"One request, p50: {_median(rates.end_to_end_tokens_per_second)} output tokens/s end to end;"
        f" {_median(rates.decode_only_tokens_per_second)} decode only, without its TTFT."
    )
    return titled("Latency, ms from the scheduled arrival", grid, color=color, below=lines)


def percentile_cells(row: Percentiles | None) -> list[str]:
    if row is None:
        return ["n/a"] * 4
    return [number(float(v)) for v in (row.mean, row.p50, row.p90, row.p99)]


def _median(row: Percentiles | None) -> str:
    return "n/a" if row is None else number(row.p50)


def _phases(report: Report, color: bool) -> RenderableType:
    timed = [d for d in report.deployments if d.phases]
    grid = table(["", *(d.name for d in timed)], color=color)
    for cells in zip(*(d.phases for d in timed), strict=True):
        shown = (f"{number(c.seconds_per_step * 1e3)}  {c.share:6.1%}" for c in cells)
        grid.add_row(cells[0].phase, *shown)
    return titled("Where a step's time goes, ms per rank and step", grid, color=color)


def _time_use(report: Report, color: bool) -> RenderableType:
    """Of simulated runs."""
    grid = table(["", *(d.name for d in report.deployments if d.attribution is not None)], color=color)
    fill_time_use(grid, report)
    return titled("Where the wall time went, all instances", grid, color=color)


def _balance(report: Report, color: bool) -> RenderableType:
    grid = table(["", "layer", "mean", "p5 of steps", "of the summed load"], color=color)
    for d in report.deployments:
        if d.expert_parallel == 1:  # one rank is always even
            continue
        loaded = [b for b in d.balancedness if b.mean is not None]
        for b in sorted(loaded, key=lambda b: b.mean or 0.0)[:_WORST_LAYERS]:
            grid.add_row(d.name, str(b.layer), *(number(v) for v in (b.mean, b.p5, b.of_sum)))
    title = "Balancedness of the ranks (mean load / max load; 1 is even), worst layers"
    return titled(title, grid, color=color)


def _rebalances(report: Report, color: bool) -> RenderableType:
    """Of simulated runs."""
    columns = ["", "at, s", "", "slots", "GB", "balancedness", "seconds"]
    grid = table(columns, color=color)
    below = fill_rebalances(grid, report)
    return titled("Experts that moved, or were shared anew", grid, color=color, below=below)


def _reasons(report: Report) -> list[str]:
    """Why fields are null, fields with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for gap in report.missing:
        if not gap.path.startswith(("options.", "commit")):
            by_reason.setdefault(gap.reason, []).append(gap.path)
    shown = {
        reason: paths[:2] + [f"{len(paths) - 2} more"] * (len(paths) > 2)
        for reason, paths in by_reason.items()
    }
    return [f"{', '.join(paths)}: {reason}" for reason, paths in shown.items()]
