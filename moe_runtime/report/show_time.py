"""Where the wall time of a simulated run went, as text; part of `show`. Formatting only."""

from collections.abc import Sequence

from rich.table import Table

from moe_runtime.report.schema import Report
from moe_runtime.report.schema_time import Attribution, TimeShare


def fill_time_use(grid: Table, report: Report) -> None:
    """A row per part, per bound and for the roofline, a column per deployment that has an attribution."""
    known = [d.attribution for d in report.deployments if d.attribution is not None]
    bounds = [[b for b in a.total.bounds if b.name != "idle"] for a in known]  # stands among the parts
    for row in (*_rows([a.total.parts for a in known]), *_rows(bounds, "bound by ")):
        grid.add_row(*row)
    if known:
        grid.add_row("ideal / real seconds of steps", *(_roofline(a) for a in known))


def _rows(columns: Sequence[Sequence[TimeShare]], prefix: str = "") -> list[list[str]]:
    """Names that no deployment spends time on are left out."""
    return [
        [prefix + cells[0].name, *(f"{100 * c.share:.1f} %" for c in cells)]
        for cells in zip(*columns, strict=True)
        if any(c.seconds > 0 for c in cells)
    ]


def _roofline(attribution: Attribution) -> str:
    roofline = attribution.total.roofline
    return "n/a" if roofline is None else f"{roofline:.2f}"
