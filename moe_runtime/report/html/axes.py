"""The frame of a chart: an SVG with axes, grid lines and a description. Knows nothing of reports.

Charts are drawn WIDE units wide and shown at about that many pixels, so their text stays readable on a
phone; a page has several side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.report.html.markup import Child, Html, el, join
from moe_runtime.report.html.scale import Scale, place, tick_label, ticks

WIDE = 380.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 8.0, 8.0, 22.0


@dataclass(frozen=True, slots=True)
class Frame:
    """Scales of a chart whose plot is `tall` units high."""

    x: Scale
    y: Scale
    tall: float

    @classmethod
    def of(cls, x: tuple[float, float], y: tuple[float, float], tall: float) -> "Frame":
        return cls(Scale(*x, LEFT, WIDE - RIGHT), Scale(*y, TOP + tall, TOP), tall)

    @property
    def height(self) -> float:
        return TOP + self.tall + BOTTOM

    @property
    def bottom(self) -> float:
        return TOP + self.tall


def svg(height: float, description: Child, *children: Child) -> Html:
    """A picture that scales with its column; `description` is read to who cannot see it."""
    return el(
        "svg",
        el("title", description),
        *children,
        viewBox=f"0 0 {place(WIDE)} {place(height)}",
        role="img",
        class_="chart",
    )


def axes(frame: Frame, *, x_unit: str, x_scale: float = 1.0, y_ticks: Sequence[float] | None = None) -> Html:
    """Grid lines and values; `x_unit` stands at the end of the x axis, whose values are x / `x_scale`."""
    x, y = frame.x, frame.y
    parts = []
    for value in ticks(y.low, y.high) if y_ticks is None else y_ticks:
        at = place(y(value))
        parts += [
            el("line", x1=place(x.start), x2=place(x.end), y1=at, y2=at, class_="grid"),
            el("text", tick_label(value), x=place(x.start - 6), y=place(y(value) + 3.5), class_="tick end"),
        ]
    below = place(frame.bottom + 15)
    for value in ticks(x.low / x_scale, x.high / x_scale, 5):
        if (along := x(value * x_scale)) < x.end - 24:  # the unit stands there
            parts.append(el("text", tick_label(value), x=place(along), y=below, class_="tick mid"))
    parts.append(el("text", x_unit, x=place(x.end), y=below, class_="tick end unit"))
    return el("g", *parts, aria_hidden="true")


def text_at(x: float, y: float, *children: Child, class_: str) -> Html:
    return el("text", *children, x=place(x), y=place(y), class_=class_)


def hover(
    x: float, y: float, width: float, height: float, title: Child, **marks: str | int | float | None
) -> Html:
    """An unseen area that shows `title` under the pointer."""
    return el(
        "rect",
        el("title", title),
        x=place(x),
        y=place(y),
        width=place(width),
        height=place(height),
        class_="hover",
        **marks,
    )


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """Path data through points."""
    return "M" + "L".join(f"{place(x)} {place(y)}" for x, y in points)


def panel(title: Child, unit: Child, picture: Html, *below: Child) -> Html:
    """A chart under its title."""
    head = el("figcaption", el("b", title), " ", el("span", unit, class_="dim"))
    return el("figure", head, picture, *below)


def legend(entries: Sequence[tuple[str, Child]]) -> Html:
    """(class of a colour, what it stands for)."""
    items = (el("li", el("i", class_=f"key {color}"), name) for color, name in entries)
    return el("ul", join(items), class_="legend")
