"""Reports as one CSV table: a row for each figure, a column for each run. Pure.

Rows are named by their path in RUN.json, deployments by their name. Left out are lists that are no
figures of the run as a whole: the plan, the log of requests, timelines, loads by rank.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

import msgspec

from moe_runtime.report.cost import costs
from moe_runtime.report.schema import Report

_LEFT_OUT = frozenset(
    {"plan", "request_log", "timeline", "rank_loads", "rebalances", "missing", "schema_version"}
)
# A spreadsheet takes a text that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render_csv(reports: Sequence[tuple[str, Report]], price_per_node_hour: float | None = None) -> str:
    """The table as text. A field that a run does not have, or that is null, is an empty cell."""
    columns = [dict(_figures(report, price_per_node_hour)) for _, report in reports]
    paths = list(dict.fromkeys(path for column in columns for path in column))
    out = StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["field", *(_safe(name) for name, _ in reports)])
    for path in paths:
        writer.writerow([_safe(path), *(_cell(column.get(path)) for column in columns)])
    return out.getvalue()


def _figures(report: Report, price: float | None) -> Iterator[tuple[str, Any]]:
    fields = msgspec.to_builtins(report)
    fields["deployments"] = {d["name"]: d for d in fields["deployments"]}
    yield from _flat("", fields)
    if price is not None:
        yield "price_per_node_hour", price
        for c in costs(report, price):
            yield f"cost_per_million.{c.role or 'all'}.{c.kind}", c.per_million


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _LEFT_OUT:
                yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, inner in enumerate(value):
            yield from _flat(f"{path}.{i}", inner)
    else:
        yield path, value


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return _safe(value) if isinstance(value, str) else value


def _safe(value: str) -> str:
    return f"'{value}" if value.startswith(_FORMULA) else value
