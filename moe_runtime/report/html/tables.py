"""Tables of a page, and the fold that keeps one beside every chart. Knows nothing of reports."""

from collections.abc import Iterable, Sequence

from moe_runtime.report.html.markup import Child, Html, el, join


def table(
    head: Sequence[Child],
    rows: Iterable[Sequence[Html]],
    *,
    words: Sequence[int] = (),
    class_: str | None = None,
) -> Html:
    """Cells are `td` or `th` elements already: see `cell` and `name`. `words`: columns that are texts."""
    names = (el("th", h, scope="col", class_="words" if i in words else None) for i, h in enumerate(head))
    body = (el("tr", *row) for row in rows)
    return el(
        "div",
        el(
            "table",
            el("thead", el("tr", *names)),
            el("tbody", join(body)),
            class_=class_,
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label="table",
    )


def name(*children: Child) -> Html:
    """The first cell of a row."""
    return el("th", *children, scope="row")


def cell(*children: Child, words: bool = False) -> Html:
    """A figure, or with `words` a text."""
    return el("td", *children, class_="words" if words else None)


def word(*children: Child) -> Html:
    """A word or two, never broken."""
    return el("td", *children, class_="word")


def fold(summary: Child, *children: Child) -> Html:
    return el("details", el("summary", summary), *children)
