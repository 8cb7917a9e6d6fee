"""A deployment over time: sums of steps and of waits in buckets of equal length. Pure functions of arrays.

A step's work counts evenly over the time it took. N steps or runs of steps of one instance, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from moe_runtime.report.facts import Span
from moe_runtime.report.outcomes import RequestOutcome
from moe_runtime.report.records import F64
from moe_runtime.report.schema_time import Timeline

BUCKETS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """Runs of steps of one instance, float64 [N]; a run is one step or several alike.

    start, seconds  of the whole run
    steps           in it
    prefill, decode prompt tokens computed and decode rows, of all ranks and steps together
    kv              fraction of the blocks in use, mean over ranks; NaN: not counted
    balancedness    of a step, mean over layers; NaN: no rows, or not known
    fill            step fill; NaN: no rows
    """

    ranks: int
    start: F64
    seconds: F64
    steps: F64
    prefill: F64
    decode: F64
    kv: F64
    balancedness: F64
    fill: F64


def make_timeline(
    name: str, series: Sequence[StepSeries], requests: Sequence[RequestOutcome], whole: Span
) -> Timeline | None:
    """Of a deployment's instances; None if none of them has a step."""
    if not any(len(s.start) for s in series):
        return None
    edges = np.linspace(whole.start, whole.end, BUCKETS + 1)
    width = whole.seconds / BUCKETS

    def total(values: Sequence[F64]) -> F64:
        parts = [_spread(s, v, edges) for s, v in zip(series, values, strict=True) if len(s.start)]
        return np.asarray(np.sum(parts, axis=0))

    def mean(columns: Sequence[F64]) -> tuple[float | None, ...]:
        """Over steps, of those that have a value."""
        known = [~np.isnan(c) for c in columns]
        weights = [np.where(k, s.steps, 0.0) for k, s in zip(known, series, strict=True)]
        values = [np.where(k, c, 0.0) for k, c in zip(known, columns, strict=True)]
        sums = total([v * w for v, w in zip(values, weights, strict=True)])
        return _ratio(sums, total(weights))

    decode = total([s.decode for s in series])
    active = total([s.seconds for s in series]) / (width * len(series))
    return Timeline(
        bucket_seconds=width,
        prefill_tokens_per_second=_floats(total([s.prefill for s in series]) / width),
        decode_rows_per_second=_floats(decode / width),
        batch=_ratio(decode, total([s.steps * s.ranks for s in series])),
        kv_fraction=mean([s.kv for s in series]),
        balancedness=mean([s.balancedness for s in series]),
        step_fill=mean([s.fill for s in series]),
        active_fraction=_floats(np.minimum(active, 1.0)),
        queue=_floats(_waiting(*_waits(name, requests), edges) / width),
    )


def _spread(series: StepSeries, values: F64, edges: F64) -> F64:
    """[buckets]: `values` of the runs, shared out by time."""
    knots = np.column_stack([series.start, series.start + series.seconds]).ravel()
    knots = np.maximum.accumulate(knots)  # a pipelined step may begin before the last one ended
    done = np.concatenate([[0.0], np.cumsum(values)])
    reached = np.column_stack([done[:-1], done[1:]]).ravel()
    return np.diff(np.interp(edges, knots, reached, left=0.0))


def _waits(name: str, requests: Sequence[RequestOutcome]) -> tuple[F64, F64]:
    """When requests began and ended to wait: for their first token, in decode for their second."""
    if name == "decode":
        pairs = [(r.first_token, r.second_token) for r in requests]
    else:
        pairs = [(r.scheduled_arrival, r.first_token) for r in requests]
    over = chain.from_iterable((a, b) for a, b in pairs if a is not None and b is not None)
    begin_end = np.fromiter(over, np.float64).reshape(-1, 2)
    return begin_end[:, 0], begin_end[:, 1]


def _waiting(begin: F64, end: F64, edges: F64) -> F64:
    """[buckets]: seconds waited in each bucket, all together."""

    def since(times: F64) -> F64:
        """Sum over times before each edge of what has passed since."""
        ranked = np.sort(times)
        before = np.searchsorted(ranked, edges)
        return np.asarray(edges * before - np.concatenate([[0.0], np.cumsum(ranked)])[before])

    return np.diff(since(begin) - since(end))


def _ratio(above: F64, below: F64) -> tuple[float | None, ...]:
    return tuple(a / b if b > 1e-9 else None for a, b in zip(above.tolist(), below.tolist(), strict=True))


def _floats(values: F64) -> tuple[float, ...]:
    """Rounding below zero is noise of sums."""
    return tuple(np.maximum(values, 0.0).tolist())
