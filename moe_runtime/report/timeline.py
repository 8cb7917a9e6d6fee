"""A run as a trace of all ranks, in the format that chrome://tracing and Perfetto read.

Format: the "Trace Event Format" of Chromium, complete events ("ph": "X", microseconds).
One process per instance, and per rank one row for steps and one for each micro-batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moe_runtime.files import write_atomically
from moe_runtime.report.records import PHASES

ROWS_PER_RANK = 4


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of one phase; times in seconds of the monotonic clock, layer and micro-batch -1 outside."""

    start: float
    end: float
    step: int
    layer: int
    micro_batch: int
    phase: int


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The spans of one rank."""

    instance: str
    rank: int
    spans: list[Span]


def write_timeline(path: Path, timelines: Sequence[RankTimeline]) -> None:
    """Write the trace as JSON, the whole file or nothing."""
    starts = [s.start for t in timelines for s in t.spans[:1]]
    origin = min(starts, default=0.0)
    instances = list(dict.fromkeys(t.instance for t in timelines))
    events = [e for t in timelines for e in _rank_events(t, instances.index(t.instance), origin)]
    write_atomically(path, msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def _rank_events(timeline: RankTimeline, process: int, origin: float) -> Iterator[dict[str, Any]]:
    base = timeline.rank * ROWS_PER_RANK
    yield _name("process_name", process, base, timeline.instance)
    for row, text in enumerate(("steps", "outside layers", "micro-batch 0", "micro-batch 1")):
        yield _name("thread_name", process, base + row, f"rank {timeline.rank} {text}")
    yield from _steps(timeline.spans, process, base, origin)
    for s in timeline.spans:
        label = PHASES[s.phase] + ("" if s.layer < 0 else f" L{s.layer}")
        arguments = {"step": s.step, "layer": s.layer, "micro_batch": s.micro_batch}
        row = base + 2 + s.micro_batch
        yield _event(label, PHASES[s.phase], (s.start, s.end), process, row, origin, arguments)


def _steps(spans: Iterable[Span], process: int, row: int, origin: float) -> Iterator[dict[str, Any]]:
    bounds: dict[int, tuple[float, float]] = {}
    for s in spans:
        first, last = bounds.get(s.step, (s.start, s.end))
        bounds[s.step] = (min(first, s.start), max(last, s.end))
    for step, (start, end) in bounds.items():
        yield _event(f"step {step}", "step", (start, end), process, row, origin, {"step": step})


def _event(
    name: str,
    category: str,
    when: tuple[float, float],
    process: int,
    row: int,
    origin: float,
    arguments: dict[str, int],
) -> dict[str, Any]:
    start, end = when
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": round(1e6 * (start - origin), 1),
        "dur": round(1e6 * (end - start), 1),
        "pid": process,
        "tid": row,
        "args": arguments,
    }


def _name(kind: str, process: int, row: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": text}}
