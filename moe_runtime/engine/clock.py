"""StepClock: exclusive phase times of one rank's step, and their trace if somebody wants it.

At any moment exactly one phase runs, so the phases of a step sum to its wall time.
"""

import time

from moe_runtime.report.records import PHASES
from moe_runtime.report.timeline import Span

_INDEX = {name: i for i, name in enumerate(PHASES)}
OUTSIDE = -1  # micro-batch and layer of what is not in a layer


class StepClock:
    """Adds up the seconds between `begin` and `end` by phase.

    With `trace`, every stretch of a phase is kept as a Span, up to `MAX_SPANS` of them; what runs before
    the first step is warm-up, and is not.
    """

    MAX_SPANS = 400_000

    def __init__(self, *, trace: bool = False) -> None:
        self.seconds = [0.0] * len(PHASES)
        self.start = 0.0  # of the monotonic clock; 0 before the first step
        self.step = 0
        self.layer = OUTSIDE
        self.micro_batch = OUTSIDE
        self._mark = 0.0
        self._phase = _INDEX["other"]
        self._spans: list[Span] | None = [] if trace else None

    def begin(self, step: int) -> None:
        """A new step: everything back to zero, phase `other`."""
        self.step = step
        self.seconds = [0.0] * len(PHASES)
        self.start = self._mark = time.monotonic()
        self._phase = _INDEX["other"]
        self.micro_batch = self.layer = OUTSIDE

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self._book()
        self._phase = _INDEX[phase]

    def at(self, micro_batch: int, layer: int) -> None:
        """What follows belongs to this micro-batch and layer."""
        if self._spans is not None and (micro_batch, layer) != (self.micro_batch, self.layer):
            self._book()
        self.micro_batch, self.layer = micro_batch, layer

    def end(self) -> float:
        """End the step; returns its wall seconds."""
        self.enter("other")
        return self._mark - self.start

    def take_spans(self) -> list[Span]:
        """The trace since the last call."""
        spans = self._spans or []
        if self._spans is not None:
            self._spans = []
        return spans

    def _book(self) -> None:
        if not self.start:
            return
        now = time.monotonic()
        self.seconds[self._phase] += now - self._mark
        if self._spans is not None and len(self._spans) < self.MAX_SPANS and now > self._mark:
            span = Span(self._mark, now, self.step, self.layer, self.micro_batch, self._phase)
            self._spans.append(span)
        self._mark = now
