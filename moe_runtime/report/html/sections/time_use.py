"""Where a step's time goes: by phase as measured, and by part and bound where a simulation tells."""

from collections.abc import Sequence
from typing import NamedTuple

from moe_runtime.report.html.axes import legend, panel
from moe_runtime.report.html.bars import stacked_bar
from moe_runtime.report.html.figures import Format, Key, Run, milliseconds
from moe_runtime.report.html.markup import Html, el, join
from moe_runtime.report.html.parts import of_run, role_names, role_of, section
from moe_runtime.report.html.tables import fold, name, table
from moe_runtime.report.schema import Deployment
from moe_runtime.report.show import number, percent


class _Cut(NamedTuple):
    """A way to cut the time: a tuple of entries at `path` with a name, seconds and a share."""

    title: str
    unit: str
    path: tuple[Key, ...]
    named: str
    seconds: str
    shown_seconds: tuple[str, Format]


_CUTS = (
    _Cut(
        "time of a step, by phase",
        "mean of the ranks, host time",
        ("phases",),
        "phase",
        "seconds_per_step",
        ("ms per rank and step", milliseconds),
    ),
    _Cut(
        "wall time, by part",
        "of all instances",
        ("attribution", "total", "parts"),
        "name",
        "seconds",
        ("s", number),
    ),
    _Cut(
        "wall time, by what bounds it",
        "of all instances",
        ("attribution", "total", "bounds"),
        "name",
        "seconds",
        ("s", number),
    ),
)
# What computes, what travels, what waits; a phase and a part of the same kind are alike.
_COLORS = {
    "attention": "s0",
    "compute": "s0",
    "dense": "s1",
    "hbm": "s1",
    "combine": "s2",
    "experts": "s3",
    "imbalance": "s4",
    "waiting": "s4",
    "dispatch": "s5",
    "link": "s5",
    "router": "s6",
    "routing": "s6",
    "collective": "s7",
    "launch": "s8",
    "other": "s9",
    "idle": "s10",
}


def time_use(runs: Sequence[Run]) -> Html | None:
    shown = [(run, d) for role in role_names(runs) for run in runs if (d := role_of(run, role)) is not None]
    charts = [
        _chart(run, d, cut, of_run(run, runs, f"{d.name}: {cut.title}"))
        for cut in _CUTS
        for run, d in shown
        if _entries(run, d, cut)
    ]
    if not charts:
        return None
    lines = [line for run, d in shown for line in _roofline(run, d, runs)]
    return section("attribution", "Where time goes", el("div", *charts, class_="panels two"), *lines)


def _entries(run: Run, d: Deployment, cut: _Cut) -> Sequence[dict[str, str | float]]:
    return run.value("deployments", d.name, *cut.path) or ()


def _color(name: str) -> str:
    """The same colour for the same thing, on every page."""
    return _COLORS.get(name, "s9")


def _chart(run: Run, d: Deployment, cut: _Cut, title: Html) -> Html:
    at = ("deployments", d.name, *cut.path)
    pieces, rows, key = [], [], []
    for i, entry in enumerate(_entries(run, d, cut)):
        here = (*at, i)
        named, share = str(entry[cut.named]), float(entry["share"])
        said = join([f"{named}: {percent(share)}"])
        pieces.append((_color(named), share, said, run.marks(*here, "share")))
        key.append(
            (_color(named), join([run.word(*here, cut.named), " ", run.figure(*here, "share", form=percent)]))
        )
        unit, form = cut.shown_seconds
        rows.append(
            (
                name(run.word(*here, cut.named)),
                run.figure(*here, cut.seconds, form=form, tag="td"),
                run.figure(*here, "share", form=percent, tag="td"),
            )
        )
    picture = stacked_bar(f"{cut.title}, {d.name}", pieces)
    return panel(title, cut.unit, picture, legend(key), fold("Table", table(("", unit, "share"), rows)))


def _roofline(run: Run, d: Deployment, runs: Sequence[Run]) -> list[Html]:
    if d.attribution is None or d.attribution.total.roofline is None:
        return []
    figure = run.figure("deployments", d.name, "attribution", "total", "roofline", form=percent)
    what = of_run(run, runs, f"{d.name} steps ran at ")
    text = " of the roofline: their ideal time over the time they took."
    return [el("p", what, figure, text, class_="small")]
