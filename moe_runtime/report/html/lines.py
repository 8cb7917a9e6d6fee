"""Line charts: a column of a timeline, and how a quantity is distributed over requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from moe_runtime.report.html.axes import Frame, axes, hover, polyline, svg
from moe_runtime.report.html.markup import Child, Html, Marks, el
from moe_runtime.report.html.scale import place, round_up

_TALL = 96.0
_MINUTES_FROM = 600.0  # seconds from which on an axis counts minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A quantity in buckets of equal length from 0 on; None: nothing to show there.

    titles, marks   of each bucket: what the pointer is told, and attributes of that element
    shaded          (start, end) of a stretch to set off
    top             end of the y axis; None: as the values ask
    """

    description: str
    seconds: float
    values: Sequence[float | None]
    titles: Sequence[Child]
    marks: Sequence[Marks]
    shaded: tuple[float, float] | None = None
    top: float | None = None
    color: str = "s0"


def track_chart(track: Track) -> Html:
    """The quantity over time, as steps."""
    end = max(track.seconds * len(track.values), 1e-9)
    most = max((v for v in track.values if v is not None), default=0.0)
    frame = Frame.of((0.0, end), (0.0, track.top or round_up(most)), _TALL)
    minutes = end >= _MINUTES_FROM
    parts: list[Child] = [
        _band(frame, track.shaded),
        axes(frame, x_unit="min" if minutes else "s", x_scale=60.0 if minutes else 1.0),
    ]
    bottom = place(frame.bottom)
    for first, values in _stretches(track.values):
        start = place(frame.x(first * track.seconds))
        steps = "".join(
            f"V{place(frame.y(v))}H{place(frame.x((first + i + 1) * track.seconds))}"
            for i, v in enumerate(values)
        )
        parts.append(el("path", d=f"M{start} {bottom}{steps}V{bottom}Z", class_=f"area {track.color}"))
        top = place(frame.y(values[0]))
        parts.append(el("path", d=f"M{start} {top}{steps}", class_=f"line {track.color}"))
    for i, (title, marks) in enumerate(zip(track.titles, track.marks, strict=True)):
        left, right = frame.x(i * track.seconds), frame.x((i + 1) * track.seconds)
        parts.append(hover(left, frame.bottom - _TALL, right - left, _TALL, title, **marks))
    return svg(frame.height, track.description, *parts)


def _band(frame: Frame, shaded: tuple[float, float] | None) -> Html | None:
    if shaded is None:
        return None
    left, right = frame.x(shaded[0]), frame.x(shaded[1])
    return el(
        "rect",
        x=place(left),
        y=place(frame.bottom - frame.tall),
        width=place(right - left),
        height=place(frame.tall),
        class_="band",
    )


def _stretches(values: Sequence[float | None]) -> list[tuple[int, list[float]]]:
    """(index of its first value, values) of each stretch without gaps."""
    found, first = [], 0
    for known, group in groupby(values, key=lambda v: v is not None):
        stretch = [v or 0.0 for v in group]
        if known:
            found.append((first, stretch))
        first += len(stretch)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values of one run in rising order, possibly none, and marked percentiles.

    marked    (fraction, value, what the pointer is told, attributes)
    """

    color: str
    values: Sequence[float]
    marked: Sequence[tuple[float, float, Child, Marks]]


def distribution_chart(description: str, curves: Sequence[Curve], *, unit: str, limit: float | None) -> Html:
    """Share of the requests with at most a value, to a little beyond the p99. `limit`: an upright line."""
    marked = [value for c in curves for _, value, _, _ in c.marked]
    most = round_up(1.05 * max([*marked, limit or 0.0]), 5)
    frame = Frame.of((0.0, most), (0.0, 1.0), _TALL + 24)
    parts: list[Child] = [axes(frame, x_unit=unit, y_ticks=(0.0, 0.25, 0.5, 0.75, 1.0))]
    if limit is not None:
        at = place(frame.x(limit))
        parts.append(
            el(
                "line",
                el("title", "the objective"),
                x1=at,
                x2=at,
                y1=place(frame.bottom - frame.tall),
                y2=place(frame.bottom),
                class_="limit",
            )
        )
    for curve in curves:
        if curve.values:
            parts.append(el("path", d=polyline(_steps(curve.values, frame)), class_=f"line {curve.color}"))
        for share, value, title, marks in curve.marked:
            spot = {"cx": place(frame.x(value)), "cy": place(frame.y(share))}
            parts.append(el("circle", el("title", title), r=4, class_=f"spot {curve.color}", **spot, **marks))
    return svg(frame.height, description, *parts)


def _steps(values: Sequence[float], frame: Frame, most: int = 200) -> list[tuple[float, float]]:
    """The empirical distribution: every value of a few, evenly spaced ranks of many."""
    n = len(values)
    ranks = range(n) if n <= most else sorted({round(i * (n - 1) / (most - 1)) for i in range(most)})
    points = [(frame.x(0.0), frame.y(0.0))]
    for rank in ranks:
        if values[rank] > frame.x.high:
            break
        points += [(frame.x(values[rank]), points[-1][1]), (frame.x(values[rank]), frame.y((rank + 1) / n))]
    return points
