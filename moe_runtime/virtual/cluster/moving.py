"""Moving: where an instance stands with experts on the move. Knows no scheduler, no placement and no cost.

All ranks of an instance stand alike. As in the engine (`engine.balancing.mover`), a unit begins, is staged
beside the turns that follow, and is committed; a unit that takes too long has the attempt dropped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_runtime.engine.agree import MoveOffer, MoveOrder, MovePhase
from moe_runtime.virtual.cluster.times import StepTimes

PAUSE = 0.001  # between turns in which there is nothing to do but move experts, as in the engine
_CLOSE = 1e-6  # of a pause: times that were added up differently


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveUnit:
    """Experts that are staged and committed together.

    seconds         that the copies take at least
    turns           in which something leaves a rank, as only so much may in one
    commit_seconds  that the step which commits them takes longer
    """

    seconds: float
    turns: int = 1
    commit_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """An attempt to go to another placement: at least one unit.

    timeout    seconds for a unit to begin, and for it to be staged
    committed  is told how many units are; says what steps take from then on, None: what they did
    dropped    is told why the attempt has ended before its last unit was committed
    """

    units: tuple[MoveUnit, ...]
    timeout: float
    committed: Callable[[int], StepTimes | None]
    dropped: Callable[[str], None]


@dataclass(slots=True)
class Moving:
    """`unit` counts from 1; it is staged once `turns_left` is 0 and `staged_at` has come. None: not begun."""

    moves: Moves
    deadline: float
    unit: int = 1
    staged_at: float | None = None
    turns_left: int = 0
    failed: str = ""
    _idle_since: float | None = None

    def offer(self, now: float) -> MoveOffer:
        """What every rank offers in a turn at `now`. Call it once in every turn."""
        idle, self._idle_since = self._idle_since, None
        self.turns_left -= 1 if idle is None else max(1, math.floor((now - idle) / PAUSE + _CLOSE))
        phase = MovePhase.READY
        if self.staged_at is not None:
            staged = now >= self.staged_at and self.turns_left <= 0
            phase = MovePhase.STAGED if staged else MovePhase.STAGING
        if now > self.deadline and not self.failed:
            what = "began" if self.staged_at is None else "was staged"
            self.failed = f"not every rank {what} within {self.moves.timeout:g} s"
        return MoveOffer(self.unit, phase, failed=bool(self.failed))

    def follow(self, order: MoveOrder, now: float) -> bool:
        """Do as agreed; whether a unit is committed now."""
        if order.begin:
            one = self.moves.units[self.unit - 1]
            self.staged_at, self.turns_left = now + one.seconds, one.turns
            self.deadline = now + self.moves.timeout
        if not order.commit:
            return False
        self.unit, self.staged_at = self.unit + 1, None
        self.deadline = now + self.moves.timeout
        return True

    @property
    def done(self) -> bool:
        """All units are committed."""
        return self.unit > len(self.moves.units)

    def alike(self) -> tuple[int, float]:
        """Turns, this one among them, that offer what this one did, if the last comes before that time."""
        if self.staged_at is None or self.failed:
            return 1, self.deadline
        if self.turns_left > 0:
            return self.turns_left, self.deadline
        return 1 << 30, min(self.staged_at, self.deadline)

    def skip(self, turns: int) -> None:
        """So many turns were held that all offered the same."""
        self.turns_left -= turns

    def doze(self, now: float) -> float:
        """There is nothing else to do: when the next turn is that changes anything."""
        self._idle_since = now
        if self.staged_at is None or self.failed:
            return now + PAUSE
        return min(max(self.staged_at, now + max(self.turns_left, 1) * PAUSE), self.deadline + PAUSE)
