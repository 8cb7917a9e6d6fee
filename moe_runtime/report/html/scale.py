"""From values to places on a chart, and round numbers for its axes. Pure arithmetic."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight line from values [low, high] to places [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Place of a value, held inside of the chart."""
        part = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, part))


def step_of(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 x 10^n that cuts `span` into at most `most` parts."""
    least = span / most
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= least * (1 - 1e-9))


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Multiples of a round step in [low, high]."""
    step = step_of(high - low, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def round_up(high: float, most: int = 4) -> float:
    """The end of an axis from 0 that reaches `high`, on a tick; 1 if there is nothing to reach."""
    if not high > 0:
        return 1.0
    step = step_of(high, most)
    return math.ceil(high / step - 1e-9) * step


def tick_label(value: float) -> str:
    """Short: 0.25, 20, 1.5k, 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def place(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")
