"""ExpertDesk: what a rank is told and asked about experts and weights, and when they may change.

Owns the precedence of what has to be agreed: experts on the move first, then a reload, and while one is on
its way no expert begins to move. LOCAL: only what `agree` orders happens on all ranks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from moe_runtime.engine.agree import MoveOffer, MoveOrder
from moe_runtime.engine.balancing.agent import Balancing, placement_now
from moe_runtime.engine.balancing.load import ExpertLoad
from moe_runtime.engine.balancing.reload import Reloader
from moe_runtime.engine.balancing.wire import (
    AskPlacement,
    BalancingStatus,
    FinishReload,
    NewPlacement,
    Rebalance,
    RecordedLoads,
    RecordLoads,
    Reload,
    ToFrontendBalancing,
    ToRankBalancing,
    WindowLoads,
)
from moe_runtime.placement.placement import Placement

READING_SECONDS = 0.05  # between looks at a thread that reads weights


@dataclass(slots=True, kw_only=True)
class ExpertDesk:
    """`balancing` None: experts stay where `placement` has them. `layers`: the MoE layers' numbers."""

    instance: str
    deployment: str
    rank: int
    layers: tuple[int, ...]
    load: ExpertLoad
    placement: Placement
    reload: Reloader
    balancing: Balancing | None = None

    @property
    def busy(self) -> bool:
        """Experts or weights are about to change, so steps are wanted."""
        return self.reload.busy or (self.balancing is not None and self.balancing.busy)

    @property
    def patience(self) -> float:
        """Seconds after which to look again, whatever happens."""
        return READING_SECONDS if self.reload.reading else 1.0

    def poll(self, now: float) -> Sequence[tuple[int, ToFrontendBalancing]]:
        """Look after the solver and a reload; what to tell which frontend."""
        if self.balancing is not None:
            self.balancing.poll(now, hold=self.reload.pending)
        return self.reload.poll(now)

    def offer(self) -> MoveOffer:
        """What this rank proposes."""
        if self.balancing is not None and self.balancing.busy:
            return self.balancing.offer()
        return self.reload.offer()

    def follow(self, order: MoveOrder) -> None:
        """Do what was agreed, before the forward pass. An order to drop is for what this rank offered."""
        if self.balancing is not None and self.balancing.busy:
            self.balancing.follow(order)
        else:
            self.reload.follow(order, self.placement if self.balancing is None else self.balancing.placement)

    def handle(self, message: ToRankBalancing) -> list[tuple[int, ToFrontendBalancing]]:
        """Take a message; what to answer to which frontend."""
        balancing = self.balancing
        match message:
            case AskPlacement(frontend=frontend):
                now = placement_now(self.instance, self.placement) if balancing is None else balancing.now()
                return [(frontend, msgspec.structs.replace(now, weights=self.reload.path))]
            case RecordLoads(frontend=frontend, action=action):
                return self._record(frontend, action)
            case NewPlacement() if self.reload.begun:
                pass  # it comes so late that the others have dropped it, or the reload would not have begun
            case WindowLoads() | NewPlacement() | Rebalance():
                if balancing is not None:
                    balancing.handle(message)
            case Reload():
                self.reload.prepare(message, time.monotonic())
            case FinishReload():
                self.reload.finish(message)
        return []

    def _record(self, frontend: int, action: str) -> list[tuple[int, ToFrontendBalancing]]:
        if action == "start":
            self.load.start()
        elif action == "stop":
            self.load.stop()
        else:
            recorded = RecordedLoads(
                instance=self.instance,
                deployment=self.deployment,
                rank=self.rank,
                layers=list(self.layers),
                pairs=self.load.recorded_LE.tobytes(),
            )
            return [(frontend, recorded)]
        return []

    def status(self, now: float) -> BalancingStatus | None:
        """For the metrics."""
        return None if self.balancing is None else self.balancing.status(now)

    def close(self) -> None:
        """End the threads and the solver."""
        self.reload.close()
        if self.balancing is not None:
            self.balancing.close()
