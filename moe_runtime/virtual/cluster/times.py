"""Step times: seconds of a step of an instance, from the cost model or from what a real engine measured."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.run import grown, sum_steps
from moe_runtime.virtual.cost.shapes import BOUNDS, PARTS, StepCost, StepShape


class StepTimes(Protocol):
    """How long steps of one instance take."""

    def step(self, shape: StepShape) -> StepCost:
        """One step."""
        ...

    def run(self, shape: StepShape, steps: int) -> tuple[StepCost, StepCost]:
        """`steps` steps from `shape` on, each adding a token to every decoding context; and the last."""
        ...


class ModelTimes:
    """What the cost model says."""

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def step(self, shape: StepShape) -> StepCost:
        return self._model.step(shape)

    def run(self, shape: StepShape, steps: int) -> tuple[StepCost, StepCost]:
        known: dict[int, StepCost] = {}

        def at(step: int) -> StepCost:
            if step not in known:
                known[step] = self._model.step(grown(shape, step))
            return known[step]

        return sum_steps(at, steps), at(steps - 1)


class MeasuredTimes:
    """Means of measured steps, by the decode and prefill rows of the ranks that had most of them.

    Rows that were never seen get the mean of those nearest to them. How a step's time is made up is not
    known, so all of it counts as `other`, bound by compute.
    """

    def __init__(self, steps: Iterable[tuple[int, int, float]]) -> None:
        """(decode rows, prefill rows, seconds) of each measured step, at least one."""
        seen: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for decode, prefill, seconds in steps:
            seen[decode, prefill].append(seconds)
        self._seconds = {rows: float(np.mean(values)) for rows, values in seen.items()}
        self._rows = np.array(list(self._seconds))
        self._values = np.array(list(self._seconds.values()))

    def step(self, shape: StepShape) -> StepCost:
        rows = int(shape.decode_sequences_R.max()), int(shape.prefill_tokens_R.max())
        seconds = self._seconds.get(rows)
        if seconds is None:
            distance = np.abs(self._rows - rows).sum(axis=1)
            seconds = float(self._values[distance == distance.min()].mean())
        return plain_cost(seconds)

    def run(self, shape: StepShape, steps: int) -> tuple[StepCost, StepCost]:
        one = self.step(shape)
        return one.times(steps), one


def plain_cost(seconds: float) -> StepCost:
    """A cost of which nothing is known but its length."""
    parts, bounds = dict.fromkeys(PARTS, 0.0), dict.fromkeys(BOUNDS, 0.0)
    parts["other"] = bounds["compute"] = seconds
    return StepCost(seconds=seconds, parts=parts, bounds=bounds, communication=0.0, exposed=0.0)


def slowed(cost: StepCost, factor: float) -> StepCost:
    """The same with one rank that takes `factor` times as long: all others wait for it."""
    if factor == 1.0:
        return cost
    waited = (factor - 1) * cost.seconds
    return replace(
        cost,
        seconds=cost.seconds + waited,
        parts={**cost.parts, "imbalance": cost.parts["imbalance"] + waited},
        bounds={**cost.bounds, "imbalance": cost.bounds["imbalance"] + waited},
    )


def lengthened(cost: StepCost, seconds: float) -> StepCost:
    """The same, after `seconds` in which experts are copied to where they will be used."""
    return replace(
        cost,
        seconds=cost.seconds + seconds,
        parts={**cost.parts, "other": cost.parts["other"] + seconds},
        bounds={**cost.bounds, "hbm": cost.bounds["hbm"] + seconds},
    )


def stretch(
    times: StepTimes, shape: StepShape, turns: int, until: float | None, *, begin: float, factor: float
) -> tuple[int, float, StepCost]:
    """How many of `turns` equal steps from `begin` on begin before `until`; when, from there, the last does;
    what all of them cost. `factor`: as in `slowed`.
    """
    first = slowed(times.step(shape), factor)
    if until is not None and turns > 1:
        # Contexts grow, so no step is shorter than the first.
        turns = min(turns, math.ceil((until - begin) / first.seconds))
    while turns > 1:
        cost, last = times.run(shape, turns)
        before = (cost.seconds - last.seconds) * factor
        if until is None or begin + before < until:
            return turns, before, slowed(cost, factor)
        turns -= 1
    return 1, 0.0, first
