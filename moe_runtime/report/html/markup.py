"""HTML as values: what is not Html is text and is escaped, so no name of a plan or model can be markup.

Knows nothing of reports.
"""

import re
from collections.abc import Iterable
from html import escape

# Characters that HTML forbids, and those that turn the reading direction of what follows.
_UNFIT = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)
_VOID = frozenset({"meta", "br", "input", "col"})
Attribute = str | int | float | bool | None
Marks = dict[str, Attribute]


class Html(str):
    """Markup that is safe already. Made by `el`, `join` and `text`, and from constants of this package."""

    __slots__ = ()


Child = Html | str | None


def text(value: str) -> Html:
    """Escaped text; what cannot stand in a page is shown as the replacement character."""
    return Html(escape(_UNFIT.sub("\ufffd", value)))


def join(parts: Iterable[Child]) -> Html:
    """Parts one after the other; strings are escaped, None is left out."""
    return Html("".join(p if isinstance(p, Html) else text(p) for p in parts if p is not None))


def el(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """One element. `class_` and `data_path` are class and data-path; None and False leave one out."""
    named = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{named}>")
    return Html(f"<{tag}{named}>{join(children)}</{tag}>")


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    shown = name.rstrip("_").replace("_", "-")
    return f" {shown}" if value is True else f' {shown}="{text(str(value))}"'
