#!/usr/bin/env python3
"""Draw the middle of a timeline (`--timeline-out F.json`) as a picture.

One band per rank, in it a row per micro-batch and one for what is outside the layers; colours are phases,
numbers layers. Times count from the left edge. `python scripts/timeline_png.py F.json F.png`
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Computation in warm colours, the network in blues, everything else in greys.
COLOURS = {
    "attention": "#e69f00",
    "routing": "#f0c95c",
    "experts": "#d55e00",
    "dispatch": "#56b4e9",
    "combine": "#0072b2",
    "waiting": "#d9d9d9",
    "other": "#9a9a9a",
}
ROWS = ("outside layers", "micro-batch 0", "micro-batch 1")
LABELLED = 0.012  # part of the width from which on a bar has its layer's number


@dataclass(frozen=True)
class Bar:
    """A stretch of one phase; microseconds. `row` is an index into ROWS, `layer` -1 outside."""

    rank: int
    row: int
    start: float
    duration: float
    phase: str
    layer: int


@dataclass(frozen=True)
class Window:
    """Bars of one instance in [start, end), and where its steps begin there, by number."""

    instance: str
    start: float
    end: float
    bars: list[Bar]
    steps: dict[int, float]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(rank, row) from top to bottom, those that have bars."""
        return sorted({(b.rank, b.row) for b in self.bars})


def middle(trace: dict[str, Any], *, instance: str | None, steps: int) -> Window:
    """The `steps` steps nearest to the middle of an instance's run. SystemExit when there are none."""
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found = [pid for pid, name in names.items() if instance in (None, name)]
    if not found:
        sys.exit(f"no instance {instance}; there are {', '.join(names.values()) or 'none'}")
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"].split(" ", 2) for e in events if e["name"] == "thread_name"
    }
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == found[0] and e["cat"] != "step"]
    forward = sorted({e["args"]["step"] for e in spans if e["args"]["layer"] >= 0})
    if not forward:
        sys.exit(f"instance {names[found[0]]} ran no steps")
    wanted = _run_of(forward, steps)
    spans = [e for e in spans if e["args"]["step"] in wanted]
    origin = min(e["ts"] for e in spans)
    bars = []
    for e in spans:
        _, rank, row = threads[e["pid"], e["tid"]]
        bar = Bar(int(rank), ROWS.index(row), e["ts"] - origin, e["dur"], e["cat"], e["args"]["layer"])
        bars.append(bar)
    begins = {s: min(e["ts"] for e in spans if e["args"]["step"] == s) - origin for s in sorted(wanted)}
    return Window(names[found[0]], origin, max(b.start + b.duration for b in bars) + origin, bars, begins)


def _run_of(forward: list[int], steps: int) -> set[int]:
    """So many step numbers in a row, as near to the middle as there are; fewer if there are nowhere so many.

    `forward` are steps that ran layers: between others all ranks slept, which is long and says nothing.
    """
    for length in range(min(steps, len(forward)), 0, -1):
        centre = (len(forward) - length) // 2
        for first in sorted(range(len(forward) - length + 1), key=lambda i: abs(i - centre)):
            run = forward[first : first + length]
            if run[-1] - run[0] == length - 1:
                return set(run)
    return set()


def draw(window: Window, path: Path) -> None:
    """The picture, in the format of the file's ending."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, width = window.rows, window.end - window.start
    places, y = {}, 0.0
    for i, (rank, row) in enumerate(rows):
        y += 1.0 if not i or rows[i - 1][0] == rank else 1.5
        places[rank, row] = y
    figure = Figure(figsize=(14, 1.6 + 0.42 * y), layout="constrained")
    axes = figure.subplots()
    for (rank, row), at in places.items():
        bars = [b for b in window.bars if (b.rank, b.row) == (rank, row)]
        spans = [(b.start / 1e3, b.duration / 1e3) for b in bars]
        axes.broken_barh(spans, (at - 0.42, 0.84), color=[COLOURS[b.phase] for b in bars], linewidth=0)
        for b in bars:
            if b.layer >= 0 and b.duration > LABELLED * width:
                middle_ms = (b.start + b.duration / 2) / 1e3
                axes.text(middle_ms, at, str(b.layer), ha="center", va="center", fontsize=8, color="black")
    for number, start in window.steps.items():
        axes.axvline(start / 1e3, color="black", linewidth=0.8)
        axes.text(start / 1e3, 0.35, f" step {number}", fontsize=8, va="center")
    axes.set_yticks(list(places.values()), [f"rank {rank}, {ROWS[row]}" for rank, row in places])
    axes.set_ylim(y + 0.6, 0.1)
    axes.set_xlim(0, width / 1e3)
    axes.set_xlabel("ms")
    seen = {b.phase for b in window.bars}
    legend = [Patch(color=colour, label=phase) for phase, colour in COLOURS.items() if phase in seen]
    figure.legend(handles=legend, loc="outside upper right", ncols=len(legend), frameon=False, fontsize=8)
    figure.suptitle(f"{window.instance}, numbers are layers", x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="F.json")
    parser.add_argument("picture", type=Path, metavar="F.png")
    parser.add_argument("--instance", help="by name, as decode-0; default: the first")
    parser.add_argument("--steps", type=int, default=2, help="how many, from the middle of the run")
    a = parser.parse_args()
    try:
        draw(middle(json.loads(a.trace.read_text()), instance=a.instance, steps=a.steps), a.picture)
    except ImportError:
        sys.exit("a picture needs matplotlib: pip install 'moe-runtime[report]'")


if __name__ == "__main__":
    main()
