"""Several runs side by side: key figures, and by how much each differs from the first."""

from collections.abc import Sequence

from moe_runtime.report.compare import differences
from moe_runtime.report.cost import kinds_of
from moe_runtime.report.html.axes import panel
from moe_runtime.report.html.bars import bar_chart
from moe_runtime.report.html.figures import Format, Key, Run, count
from moe_runtime.report.html.markup import Child, Html, Marks, el
from moe_runtime.report.html.parts import bullets, color, role_names, role_of, run_name, section, swatch
from moe_runtime.report.html.tables import cell, name, table
from moe_runtime.report.show import number, percent

_Row = tuple[str, tuple[Key, ...], Format]

_SYSTEM: tuple[_Row, ...] = (
    ("nodes", ("system", "nodes"), count),
    ("ranks", ("system", "ranks"), count),
    ("window, s", ("window", "seconds"), number),
    ("output tokens/s per node of all", ("system", "throughput", "output", "per_node_of_all"), number),
    ("new prefill, same", ("system", "throughput", "new_prefill", "per_node_of_all"), number),
    ("cached prefill, same", ("system", "throughput", "cached_prefill", "per_node_of_all"), number),
    ("TTFT p50, ms", ("latency", "ttft_ms", "p50"), number),
    ("TTFT p99, ms", ("latency", "ttft_ms", "p99"), number),
    ("TPOT p50, ms", ("latency", "tpot_ms", "p50"), number),
    ("TPOT p99, ms", ("latency", "tpot_ms", "p99"), number),
    ("end to end p99, ms", ("latency", "end_to_end_ms", "p99"), number),
    ("goodput, requests/s", ("goodput", "requests_per_second"), number),
    ("goodput, part of the requests", ("goodput", "fraction"), percent),
    ("requests failed", ("requests", "failed"), count),
)
_ROLE: tuple[_Row, ...] = (
    ("EP degree", ("expert_parallel",), count),
    ("nodes", ("nodes",), count),
    ("redundant experts", ("redundant_experts",), count),
    ("output tokens/s per node of the role", ("throughput", "output", "per_node_of_role"), number),
    ("new prefill, same", ("throughput", "new_prefill", "per_node_of_role"), number),
    ("mean step, ms", ("mean_step_ms",), number),
    ("step fill", ("step_fill",), percent),
    ("transport time hidden", ("hidden",), percent),
    ("peak KV use", ("kv", "peak_fraction"), percent),
)
_WORDS = (("created", ("created",)), ("plan", ("plan_digest",)), ("hardware", ("machine", "hardware")))
_BARS = (
    ("Output", "tokens/s per node of all", ("system", "throughput", "output", "per_node_of_all")),
    ("New prefill", "tokens/s per node of all", ("system", "throughput", "new_prefill", "per_node_of_all")),
    ("TTFT", "p99, ms", ("latency", "ttft_ms", "p99")),
    ("TPOT", "p99, ms", ("latency", "tpot_ms", "p99")),
    ("Goodput", "requests/s", ("goodput", "requests_per_second")),
)


def comparison(runs: Sequence[Run]) -> Html | None:
    if len(runs) < 2:
        return None
    notes = differences([run.report for run in runs])
    charts = [_bars(runs, *bar) for bar in _BARS]
    charts += [chart for role in role_names(runs) for chart in _role_bars(runs, role)]
    text = el(
        "p", "The small figure is the difference to the first run, in per cent of it.", class_="dim small"
    )
    return section(
        "comparison",
        "Comparison",
        el("div", bullets(notes), class_="notes") if notes else None,
        el("div", *charts, class_="panels"),
        text,
        _table(runs),
    )


def _role_bars(runs: Sequence[Run], role: str) -> list[Html]:
    """Throughput of a role, of what it makes."""
    title = f"{role.capitalize()}: "
    return [
        _bars(
            runs,
            title + kind.replace("_", " "),
            "tokens/s per node of the role",
            ("deployments", role, "throughput", kind, "per_node_of_role"),
        )
        for kind in kinds_of(role)
    ]


def _bars(runs: Sequence[Run], title: str, unit: str, path: tuple[Key, ...]) -> Html:
    bars = [
        (color(r.index), run_name_text(r), r.value(*path), r.shown(*path), r.marks(*path))
        for r in runs
        if _has(r, path)
    ]
    return panel(title, unit, bar_chart(f"{title}, {unit}, by run", bars))


def run_name_text(run: Run) -> Html:
    """The name inside of a picture."""
    return el("tspan", run.name, data_name=run.index)


def _has(run: Run, path: tuple[Key, ...]) -> bool:
    return path[0] != "deployments" or role_of(run, str(path[1])) is not None


def _table(runs: Sequence[Run]) -> Html:
    head: list[Child] = ["", *(el("span", swatch(run), run_name(run)) for run in runs)]
    rows = [[name(shown), *(el("td", run.word(*at), class_="wrap") for run in runs)] for shown, at in _WORDS]
    rows += [_row(runs, *row) for row in _SYSTEM]
    for role in role_names(runs):
        rows.append([el("th", el("b", role, data_name="role"), scope="rowgroup", colspan=len(runs) + 1)])
        rows += [_row(runs, shown, ("deployments", role, *at), form) for shown, at, form in _ROLE]
    return table(head, rows)


def _row(runs: Sequence[Run], shown: str, path: tuple[Key, ...], form: Format) -> list[Html]:
    base = runs[0].value(*path) if _has(runs[0], path) else None
    cells = []
    for run in runs:
        if not _has(run, path):
            cells.append(cell("-"))
            continue
        value = run.value(*path)
        change = None
        if run.index and base and value is not None and value != base:
            marks: Marks = {"data_change": ".".join(map(str, path)), "data_run": run.index}
            change = el("span", f"{100 * (value / base - 1):+z.1f} %", class_="change", **marks)
        cells.append(cell(run.figure(*path, form=form), change))
    return [name(shown), *cells]
