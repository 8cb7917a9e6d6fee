"""Bar charts: one quantity of several runs, and a whole cut into its parts."""

from collections.abc import Sequence

from moe_runtime.report.html.axes import WIDE, svg, text_at
from moe_runtime.report.html.markup import Child, Html, Marks, el
from moe_runtime.report.html.scale import place

_ROW = 30.0
_NAME_SIZE = 11.0


def bar_chart(description: str, bars: Sequence[tuple[str, Child, float | None, Child, Marks]]) -> Html:
    """(color, name, value or None, value as shown, attributes of what shows it); bars from 0."""
    most = max((v for _, _, v, _, _ in bars if v is not None), default=0.0)
    room = WIDE - 70.0  # the value stands behind the longest bar
    parts: list[Child] = []
    for i, (color, name, value, shown, marks) in enumerate(bars):
        top = i * _ROW
        length = room * value / most if value and most > 0 else 0.0
        parts += [
            text_at(0, top + _NAME_SIZE, name, class_="tick"),
            el(
                "rect",
                x=0,
                y=place(top + 15),
                width=place(max(length, 1.0)),
                height=10,
                class_=f"bar {color}",
            ),
            el("text", shown, x=place(length + 6), y=place(top + 24), class_="value", **marks),
        ]
    return svg(_ROW * len(bars), description, *parts)


def stacked_bar(description: str, parts: Sequence[tuple[str, float, Child, Marks]]) -> Html:
    """(color, share of the whole, what the pointer is told, attributes): one bar, cut."""
    height, gap, left = 28.0, 1.0, 0.0
    pieces: list[Child] = []
    for color, share, title, marks in parts:
        width = WIDE * max(0.0, share)
        spot: Marks = {
            "x": place(left),
            "y": 0,
            "width": place(max(width - gap, 0.3)),
            "height": place(height),
        }
        pieces.append(el("rect", el("title", title), class_=f"bar {color}", **spot, **marks))
        left += width
    return svg(height, description, *pieces)
