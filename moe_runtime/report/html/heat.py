"""A heat map: load of every rank over the mean of its layer, a row per layer, a column per rank.

Colours stand for fixed bands, so that two maps can be compared. What lies in a band is one path: a map of
58 layers and 144 ranks has 8,000 cells.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby, pairwise

from moe_runtime.report.html.axes import LEFT, RIGHT, WIDE, hover, svg, text_at
from moe_runtime.report.html.markup import Child, Html, Marks, el
from moe_runtime.report.html.scale import place, ticks

# Edges of the bands; the band around 1 is neutral.
EDGES = (0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.6, 2.0)
_MOST_ROW, _MOST_HEIGHT = 22.0, 320.0
_TEXT_WIDE, _TEXT_TALL = 30.0, 14.0  # cells from this size on say their load
_CELL_TITLES = 1500  # cells up to which each has its own title; beyond, each row


def heat_map(
    description: str,
    layers: Sequence[int],
    rows: Sequence[Sequence[float]],
    path: Sequence[str | int],
    run: int,
) -> Html:
    """`rows` [layers][ranks], which stand at `path` in run `run`."""
    ranks = max((len(r) for r in rows), default=1)
    tall = min(_MOST_ROW, _MOST_HEIGHT / max(len(rows), 1))
    wide = (WIDE - LEFT - RIGHT) / max(ranks, 1)
    parts: list[Child] = [*_cells(rows, wide, tall), *_labels(layers, ranks, wide, tall)]
    each = len(rows) * ranks <= _CELL_TITLES
    written = wide >= _TEXT_WIDE and tall >= _TEXT_TALL
    dotted = ".".join(map(str, path))
    for i, (layer, row) in enumerate(zip(layers, rows, strict=True)):
        if each:
            for rank, load in enumerate(row):
                marks: Marks = {"data_run": run, "data_path": f"{dotted}.{i}.{rank}"}
                left, top = LEFT + rank * wide, i * tall
                if written:
                    at = {"x": place(left + wide / 2), "y": place(top + tall / 2 + 3.5)}
                    on = f"on mid h{band(load)}"
                    parts.append(el("text", f"{load:.2f}", class_=on, **at, **marks))
                title = f"layer {layer}, rank {rank}: {load:.3f}"
                parts.append(hover(left, top, wide, tall, title, **marks))
        else:
            worst = max(range(len(row)), key=row.__getitem__)
            title = f"layer {layer}, highest at rank {worst}: {row[worst]:.3f}"
            spot = (LEFT, i * tall, WIDE - LEFT - RIGHT, tall)
            parts.append(hover(*spot, title, data_run=run, data_path=f"{dotted}.{i}.{worst}"))
    return svg(tall * len(rows) + 18, description, *parts)


def band(load: float) -> int:
    """Index of the band, which is the number in its colour's class."""
    return bisect_right(EDGES, load)


def _cells(rows: Sequence[Sequence[float]], wide: float, tall: float) -> list[Html]:
    """A path for each band; neighbours of a row in the same band are one rectangle."""
    tall_ = place(tall + 0.15)  # a hair of overlap, or pixels shine through between rows
    shapes: dict[int, list[str]] = {}
    for i, row in enumerate(rows):
        rank = 0
        for index, group in groupby(map(band, row)):
            ranks = len(list(group))
            w = f"{ranks * wide + 0.15:.2f}"
            at = f"M{LEFT + rank * wide:.2f} {i * tall:.2f}h{w}v{tall_}h-{w}z"
            shapes.setdefault(index, []).append(at)
            rank += ranks
    return [el("path", d="".join(d), class_=f"h{index}") for index, d in sorted(shapes.items())]


def _labels(layers: Sequence[int], ranks: int, wide: float, tall: float) -> list[Html]:
    """Numbers of layers and ranks, as many as there is room for."""
    every = max(1, round(12.0 / tall + 0.49))
    parts = [
        text_at(LEFT - 6, i * tall + tall / 2 + 3.5, str(layer), class_="tick end")
        for i, layer in enumerate(layers)
        if i % every == 0
    ]
    below = tall * len(layers) + 14
    shown = ticks(0, ranks - 1, 8) if ranks > 9 else list(map(float, range(ranks)))
    parts += [
        text_at(LEFT + (rank + 0.5) * wide, below, f"{rank:.0f}", class_="tick mid")
        for rank in shown
        if rank == int(rank)
    ]
    return [el("g", *parts, aria_hidden="true")]


def heat_legend() -> Html:
    """What the colours stand for."""
    between = (f"{low:g} to {high:g}" for low, high in pairwise(EDGES))
    names = [f"under {EDGES[0]:g}", *between, f"over {EDGES[-1]:g}"]
    items = [el("li", el("i", class_=f"key h{i}"), n) for i, n in enumerate(names)]
    return el("ul", *items, class_="legend steps")
