"""StepClock: exclusive phase times of one rank's step. At any moment exactly one phase runs."""

import time

from moe_runtime.report.records import PHASES

_INDEX = {name: i for i, name in enumerate(PHASES)}


class StepClock:
    """Adds up the seconds between `begin` and `end` by phase; they sum to the step's wall time."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(PHASES)
        self.start = 0.0
        self._mark = 0.0
        self._phase = _INDEX["other"]

    def begin(self) -> None:
        """A new step: everything back to zero, phase `other`."""
        self.seconds = [0.0] * len(PHASES)
        self.start = self._mark = time.monotonic()
        self._phase = _INDEX["other"]

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        now = time.monotonic()
        self.seconds[self._phase] += now - self._mark
        self._mark = now
        self._phase = _INDEX[phase]

    def end(self) -> float:
        """End the step; returns its wall seconds."""
        self.enter("other")
        return self._mark - self.start
