"""Where the wall time of a simulated run went, how experts moved: part of `show`. Formatting only."""

from collections.abc import Sequence

from rich.table import Table

from moe_runtime.report.schema import Report
from moe_runtime.report.schema_time import Attribution, TimeShare

_MOST_CHANGES = 12


def fill_time_use(grid: Table, report: Report) -> None:
    """A row per part, per bound and for the roofline, a column per deployment that has an attribution."""
    known = [d.attribution for d in report.deployments if d.attribution is not None]
    bounds = [[b for b in a.total.bounds if b.name != "idle"] for a in known]  # stands among the parts
    for row in (*_rows([a.total.parts for a in known]), *_rows(bounds, "bound by ")):
        grid.add_row(*row)
    if known:
        grid.add_row("ideal / real seconds of steps", *(_roofline(a) for a in known))


def fill_rebalances(grid: Table, report: Report) -> str:
    """A row for each of the first changes of all deployments; what to say of the others."""
    known = [d.balancing for d in report.deployments if d.balancing is not None]
    changes = sorted((r for b in known for r in b.rebalances), key=lambda r: r.decided)
    for r in changes[:_MOST_CHANGES]:
        grid.add_row(
            r.instance,
            f"{r.decided:.1f}",
            r.action,
            f"{r.moves:,}",
            f"{r.moved_bytes / 1e9:.2f}",
            f"{r.balancedness_before:.3f} -> {r.balancedness_after:.3f}",
            f"{r.outcome} in {r.seconds:.1f}",
        )
    left = f"{len(changes) - _MOST_CHANGES} more; " if len(changes) > _MOST_CHANGES else ""
    waits, decisions = sum(b.waits for b in known), sum(b.decisions for b in known)
    return f"{left}{waits} of {decisions} decisions: to leave experts where they are"


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
