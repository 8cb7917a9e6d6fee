"""`moe-runtime report`: saved reports as text, a page, Markdown or CSV; one, or several side by side."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_runtime.files import require_outputs, write_atomically
from moe_runtime.launch.console import say, show
from moe_runtime.launch.published import references_for
from moe_runtime.report.compare import render_many
from moe_runtime.report.cost import costs_as_text
from moe_runtime.report.csv_table import render_csv
from moe_runtime.report.files import load_report
from moe_runtime.report.html.page import render_page
from moe_runtime.report.markdown import render_markdown
from moe_runtime.report.reference import Reference
from moe_runtime.report.schema import Report
from moe_runtime.report.show import render, use_color

Named = Sequence[tuple[str, Report]]


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    outputs = {"--html": arguments.html, "--markdown": arguments.markdown, "--csv": arguments.csv}
    require_outputs(outputs, {f"RUN.json {i}": path for i, path in enumerate(arguments.runs, start=1)})
    reports = [(str(path), load_report(path)) for path in arguments.runs]
    price: float | None = arguments.price_per_node_hour
    color = use_color(sys.stdout)
    show(render(reports[0][1], color=color) if len(reports) == 1 else render_many(reports, color=color))
    if price is not None:
        show("\n" + costs_as_text(reports, price))
    named = _named(arguments.runs, reports)
    writers = {"--html": _page, "--markdown": _markdown, "--csv": _csv}
    for option, path in outputs.items():
        if path is not None:
            _write(path, writers[option], named, price)
    return 0


def _named(paths: Sequence[Path], reports: Sequence[tuple[str, Report]]) -> Named:
    """Reports by the names of their files; by the paths as given where names repeat."""
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    return [(name, report) for name, (_, report) in zip(names, reports, strict=True)]


def _write(
    path: Path, writer: Callable[[Named, float | None], str], reports: Named, price: float | None
) -> None:
    write_atomically(path, writer(reports, price).encode("utf-8", errors="replace"))
    say(f"wrote {path}")


def _page(reports: Named, price: float | None) -> str:
    return render_page(reports, _references(reports), price)


def _markdown(reports: Named, price: float | None) -> str:
    return render_markdown(reports, _references(reports), price)


def _csv(reports: Named, price: float | None) -> str:
    return render_csv(reports, price)


def _references(reports: Named) -> tuple[Reference, ...]:
    return references_for(report.model for _, report in reports)
