"""Moving: where an instance stands with experts that a script has it move. Knows no scheduler and no cost."""

from dataclasses import dataclass

from moe_runtime.engine.agree import NO_OFFER, MoveOffer, MoveOrder, MovePhase
from moe_runtime.virtual.cluster.events import Rebalance

PAUSE = 0.001  # between turns in which there is nothing to do but move experts, as in the engine


@dataclass(slots=True)
class Moving:
    """One rebalance; `unit` counts from 1. All ranks of the instance stand alike."""

    script: Rebalance
    unit: int = 1
    staged_at: float | None = None

    def offer(self, now: float) -> MoveOffer:
        """What every rank offers in a turn at `now`."""
        if self.done:
            return NO_OFFER
        if self.staged_at is None:
            return MoveOffer(self.unit, MovePhase.READY)
        return MoveOffer(self.unit, MovePhase.STAGED if now >= self.staged_at else MovePhase.STAGING)

    def follow(self, order: MoveOrder, now: float) -> bool:
        """Do as agreed; whether a unit is committed now."""
        if order.begin:
            self.staged_at = now + self.script.stage_seconds[self.unit - 1]
        if not order.commit:
            return False
        self.unit, self.staged_at = self.unit + 1, None
        return True

    @property
    def done(self) -> bool:
        """All units are committed."""
        return self.unit > len(self.script.stage_seconds)
