"""A run over time: load, batch, KV and balancedness of each role."""

from collections.abc import Sequence

from moe_runtime.report.html.axes import panel
from moe_runtime.report.html.figures import Format, Run
from moe_runtime.report.html.lines import Track, track_chart
from moe_runtime.report.html.markup import Html, el, join
from moe_runtime.report.html.parts import color, of_run, role_heading, section
from moe_runtime.report.html.tables import fold, name, table
from moe_runtime.report.schema import Deployment
from moe_runtime.report.show import number, percent

# column: (title, unit, form, end of the axis); percentages are drawn as such
_COLUMNS: dict[str, tuple[str, str, Format, float | None]] = {
    "prefill_tokens_per_second": ("Load: prefill", "prompt tokens computed/s", number, None),
    "decode_rows_per_second": ("Load: decode", "rows/s", number, None),
    "queue": ("Waiting", "requests without their first token from this role", number, None),
    "batch": ("Batch", "decode rows per rank and step", number, None),
    "kv_fraction": ("KV blocks in use", "%", percent, None),
    "balancedness": ("Balancedness", "mean / max rank load of a step, mean of layers", number, 1.0),
    "step_fill": ("Step fill", "mean / max tokens of the ranks", number, 1.0),
    "active_fraction": ("Time in steps", "%", percent, 100.0),
}


def over_time(runs: Sequence[Run]) -> Html:
    parts = [part for run in runs for d in run.report.deployments for part in _role(run, d, runs)]
    text = el(
        "p",
        "From the first scheduled arrival to the last token. Shaded: the window that rates are computed over."
        " A gap says that no step ran.",
        class_="dim small",
    )
    return section("time", "Over time", text, join(parts))


def _role(run: Run, d: Deployment, runs: Sequence[Run]) -> list[Html]:
    head = role_heading(d.name) if len(runs) == 1 else el("h3", of_run(run, runs, d.name))
    if d.timeline is None:
        return [head, el("p", "n/a: ", run.reason("deployments", d.name, "timeline"), class_="dim")]
    shown = [c for c in _COLUMNS if any(getattr(d.timeline, c))]
    charts = [_panel(run, d, column) for column in shown]
    return [head, el("div", *charts, class_="panels"), fold("Table", _table(run, d, shown))]


def _panel(run: Run, d: Deployment, column: str) -> Html:
    assert d.timeline is not None
    title, unit, form, top = _COLUMNS[column]
    at = ("deployments", d.name, "timeline", column)
    factor = 100.0 if form is percent else 1.0
    values = getattr(d.timeline, column)
    seconds = d.timeline.bucket_seconds
    track = Track(
        description=f"{title} of {d.name} over time",
        seconds=seconds,
        values=[None if v is None else factor * v for v in values],
        titles=[f"{_span(i, seconds)} s: {form(v)}" for i, v in enumerate(values)],
        marks=[run.marks(*at, i) for i in range(len(values))],
        shaded=(run.report.window.start, run.report.window.end),
        top=top,
        color=color(run.index),
    )
    return panel(title, unit, track_chart(track))


def _table(run: Run, d: Deployment, shown: Sequence[str]) -> Html:
    assert d.timeline is not None
    at = ("deployments", d.name, "timeline")
    seconds = d.timeline.bucket_seconds
    rows = (
        (
            name(el("span", _span(i, seconds), class_="tick")),
            *(run.figure(*at, column, i, form=_COLUMNS[column][2], tag="td") for column in shown),
        )
        for i in range(len(d.timeline.queue))
    )
    return table(("s", *(_COLUMNS[c][0] for c in shown)), rows)


def _span(bucket: int, seconds: float) -> str:
    return f"{bucket * seconds:.4g} to {(bucket + 1) * seconds:.4g}"
