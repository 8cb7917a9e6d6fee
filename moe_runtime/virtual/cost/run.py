"""Run: many decode steps in which nothing changes but the contexts, for the price of a few.

With fixed rows a step's seconds are a piecewise linear function of the contexts: where a range proves linear,
its sum is that of its ends. Knows no scheduler; who says that nothing changes is the caller.
"""

from collections.abc import Callable
from dataclasses import replace

from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.shapes import StepCost, StepShape

LINEAR = 1e-6  # relative distance of the middle from the straight line that is taken for none


def run_cost(model: CostModel, shape: StepShape, steps: int, *, accepted: float = 1.0) -> StepCost:
    """The sum of `steps` >= 1 steps from `shape` on; each adds `accepted` tokens a sequence."""
    return sum_steps(lambda step: model.step(grown(shape, accepted * step)), steps)


def grown(shape: StepShape, tokens: float) -> StepShape:
    """The same rows with contexts longer by `tokens` a sequence."""
    if not tokens:
        return shape
    return replace(shape, decode_context_R=shape.decode_context_R + shape.decode_sequences_R * tokens)


def sum_steps(at: Callable[[int], StepCost], steps: int) -> StepCost:
    """The sum of steps 0 to `steps` - 1; `at` costs one, and is asked for both ends and some between."""
    first = at(0)
    if steps == 1:
        return first
    return _sum(at, 0, first, steps - 1, at(steps - 1)).plus(first)


def _sum(at: Callable[[int], StepCost], low: int, first: StepCost, high: int, last: StepCost) -> StepCost:
    """Steps low + 1 .. high, the costs of both ends given."""
    if high - low == 1:
        return last
    middle = (low + high) // 2
    between = at(middle)
    weight = (middle - low) / (high - low)
    straight = first.seconds + (last.seconds - first.seconds) * weight
    if abs(between.seconds - straight) <= LINEAR * straight:
        # Means of both halves, the left ends not counted.
        left, right = middle - low, high - middle
        return (
            first.times((left - 1) / 2)
            .plus(between.times((left + 1) / 2 + (right - 1) / 2))
            .plus(last.times((right + 1) / 2))
        )
    return _sum(at, low, first, middle, between).plus(_sum(at, middle, between, high, last))
