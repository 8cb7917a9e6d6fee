"""The page: one HTML file of one or several reports that needs nothing else. Pure.

It loads nothing and runs no script (its policy forbids both); the theme is chosen by CSS alone.
"""

from collections.abc import Sequence
from pathlib import Path

from moe_runtime.report.html.figures import Run, make_runs
from moe_runtime.report.html.markup import Child, Html, el, join
from moe_runtime.report.html.parts import bullets, run_name, swatch
from moe_runtime.report.html.sections.balance import balance
from moe_runtime.report.html.sections.comparison import comparison
from moe_runtime.report.html.sections.details import details
from moe_runtime.report.html.sections.latency import latency
from moe_runtime.report.html.sections.over_time import over_time
from moe_runtime.report.html.sections.published import published
from moe_runtime.report.html.sections.throughput import cost, throughput
from moe_runtime.report.html.sections.time_use import time_use
from moe_runtime.report.reference import Reference
from moe_runtime.report.schema import Report

_STYLE = Path(__file__).with_name("look.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_THEMES = ("auto", "light", "dark")
_LINKS = {
    "throughput": "Throughput",
    "cost": "Cost",
    "comparison": "Comparison",
    "latency": "Latency",
    "time": "Over time",
    "balance": "Balance",
    "attribution": "Where time goes",
    "published": "Published figures",
    "details": "Details",
}


def render_page(
    reports: Sequence[tuple[str, Report]],
    references: Sequence[Reference] = (),
    price_per_node_hour: float | None = None,
) -> str:
    """Named reports as a page. `references`: published figures of their models."""
    runs = make_runs(reports)
    sections = {
        "throughput": throughput(runs),
        "cost": None if price_per_node_hour is None else cost(runs, price_per_node_hour),
        "comparison": comparison(runs),
        "latency": latency(runs),
        "time": over_time(runs),
        "balance": balance(runs),
        "attribution": time_use(runs),
        "published": published(runs, references),
        "details": details(runs),
    }
    shown = {ident: part for ident, part in sections.items() if part is not None}
    links = el("nav", *(el("a", _LINKS[ident], href=f"#{ident}") for ident in shown), aria_label="sections")
    foot = el("footer", "Every field is explained in docs/report.md of moe-runtime.")
    body = el("body", _head(runs), links, _warnings(runs), el("main", *shown.values()), foot)
    return "<!doctype html>\n" + el("html", _meta(runs), body, lang="en") + "\n"


def _meta(runs: Sequence[Run]) -> Html:
    # The style is ours: it has no character that would end its element.
    style = Html(_STYLE.read_text(encoding="utf-8"))
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="generator", content="moe-runtime report"),
        el("title", "Report of ", ", ".join(run.name for run in runs)),
        el("style", style),
    )


def _head(runs: Sequence[Run]) -> Html:
    first = runs[0]
    badge = el("span", "simulated", class_="badge") if any(r.report.simulated for r in runs) else None
    if len(runs) == 1:
        title: list[Child] = [first.word("model", "path"), badge]
        what: list[Child] = [
            run_name(first),
            ", ",
            first.word("created"),
            ", ",
            first.word("machine", "hardware"),
        ]
    else:
        title = ["Runs side by side", badge]
        what = [
            join([swatch(run), run_name(run), " (", run.word("model", "path"), _kind(run), ") "])
            for run in runs
        ]
    return el("header", el("div", el("h1", *title), el("div", *what, class_="dim small")), _themes())


def _kind(run: Run) -> str:
    return ", simulated" if run.report.simulated else ", measured"


def _themes() -> Html:
    choices = (
        el(
            "label",
            el("input", type="radio", name="theme", id=f"theme-{theme}", checked=theme == "auto"),
            theme.capitalize(),
        )
        for theme in _THEMES
    )
    return el("fieldset", el("legend", "Theme"), *choices, class_="theme")


def _warnings(runs: Sequence[Run]) -> Html | None:
    items: list[Child] = []
    for run in runs:
        who = join([run_name(run), ": "]) if len(runs) > 1 else None
        items += [join([who, run.word("warnings", i)]) for i in range(len(run.report.warnings))]
    if not items:
        return None
    return el("aside", el("p", el("b", "Before using a number")), bullets(items), class_="notes")
