"""Figures of a run, each marked with where it stands in RUN.json, so that a page can be checked against it.

A figure is looked up by its path and shown rounded; nothing is computed. Null is shown as n/a, with its
reason for the pointer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_runtime.report.html.markup import Attribute, Html, Marks, el
from moe_runtime.report.schema import Report
from moe_runtime.report.show import number

Key = str | int
Format = Callable[[float | None], str]


@dataclass(frozen=True, slots=True)
class Run:
    """One report of a page: `index` counts from 0, `name` is what the reader calls it."""

    index: int
    name: str
    report: Report
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, index: int, name: str, report: Report) -> "Run":
        fields = msgspec.to_builtins(report)
        fields["deployments"] = {d["name"]: d for d in fields["deployments"]}
        return cls(index, name, report, fields)

    def value(self, *path: Key) -> Any:
        """The field at `path`; deployments by their name."""
        found: Any = self.fields
        for key in path:
            if found is None:
                return None
            found = found[key]
        return found

    def reason(self, *path: Key) -> str:
        """Why the field at `path` is null, or what it lies in."""
        reasons = {m.path: m.reason for m in self.report.missing}
        for end in range(len(path), 0, -1):
            if (dotted := _dotted(path[:end])) in reasons:
                return reasons[dotted]
        return "not measured"

    def shown(self, *path: Key, form: Format = number) -> str:
        """The figure as text."""
        value = self.value(*path)
        return value if isinstance(value, str) else form(value)

    def marks(self, *path: Key) -> Marks:
        """Attributes of an element whose text is, or ends with, the figure."""
        return {"data_run": self.index, "data_path": _dotted(path)}

    def figure(self, *path: Key, form: Format = number, tag: str = "span", **attributes: Attribute) -> Html:
        """The figure in an element of its own."""
        why = self.reason(*path) if self.value(*path) is None else None
        return el(tag, self.shown(*path, form=form), **self.marks(*path), title=why, **attributes)

    def word(self, *path: Key) -> Html:
        """A text of the report, such as a name; its direction cannot spill over."""
        return self.figure(*path, tag="bdi")


def make_runs(reports: Sequence[tuple[str, Report]]) -> tuple[Run, ...]:
    return tuple(Run.of(i, name, report) for i, (name, report) in enumerate(reports))


def milliseconds(seconds: float | None) -> str:
    """Seconds, shown in milliseconds."""
    return number(None if seconds is None else 1e3 * seconds)


def count(value: float | None) -> str:
    """A whole number; 0.67 where it is none, as nodes of a role may be."""
    return "n/a" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:.2f}"


def _dotted(path: Sequence[Key]) -> str:
    return ".".join(map(str, path))
