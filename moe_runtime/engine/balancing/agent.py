"""Balancing: one rank's share in live rebalancing, as the expert desk sees it.

Owns the order of the parts: the meter cuts windows, the mover takes part in transactions, and on rank 0 the
controller decides. LOCAL: only what `agree` orders happens on all ranks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.agree import MoveOffer, MoveOrder
from moe_runtime.engine.balancing.controller import Controller
from moe_runtime.engine.balancing.load import WindowMeter
from moe_runtime.engine.balancing.mover import Mover
from moe_runtime.engine.balancing.solver import SolverProcess
from moe_runtime.engine.balancing.wire import (
    BalancingStatus,
    NewPlacement,
    PlacementNow,
    Rebalance,
    WindowLoads,
    moves_from,
)
from moe_runtime.placement.placement import Placement

REHEARSAL_SECONDS = 60.0


@dataclass(slots=True, kw_only=True)
class Balancing:
    """`send` tells a rank of the instance; `controller` and `solver` are rank 0's."""

    instance: str
    mover: Mover
    meter: WindowMeter
    send: Callable[[int, msgspec.Struct], None]
    controller: Controller | None = None
    solver: SolverProcess | None = None
    stall_seconds: float = 0.0

    def rehearse(self) -> None:
        """LOCAL, in warm-up: do once what a rebalance does, so that nothing is started or allocated later.

        Raises TimeoutError if a copy or the solver takes too long.
        """
        mover = self.mover
        mover.courier.start()
        mover.rehearse((mover.rank + 1) % mover.placement.num_ranks)
        if self.solver is not None:
            assert self.controller is not None
            self.solver.start()
            self.solver.ask(self.controller.question(None))
            self.solver.wait(REHEARSAL_SECONDS)
        deadline = time.monotonic() + REHEARSAL_SECONDS
        while not mover.courier.idle:
            if time.monotonic() > deadline:
                raise TimeoutError("copying a layer's experts to a neighbour takes too long")
            time.sleep(0.001)

    @property
    def placement(self) -> Placement:
        """In use."""
        return self.mover.placement

    @property
    def epoch(self) -> int:
        """Of the placement in use."""
        return self.placement.epoch

    @property
    def busy(self) -> bool:
        """Experts are about to move, so steps are wanted."""
        return self.mover.busy

    def handle(self, message: WindowLoads | NewPlacement | Rebalance) -> None:
        """Take a message."""
        match message:
            case NewPlacement():
                self.mover.aim(message, time.monotonic())
            case WindowLoads():
                assert self.controller is not None
                self.controller.add(message)
            case Rebalance():
                assert self.controller is not None
                self.controller.force()

    def poll(self, now: float, *, hold: bool) -> None:
        """Look after the solver (rank 0). `hold`: no expert may begin to move."""
        if self.controller is not None:
            self.controller.poll(now, hold=hold)

    def offer(self) -> MoveOffer:
        """What this rank proposes."""
        return self.mover.offer(time.monotonic())

    def follow(self, order: MoveOrder) -> None:
        """Do what was agreed, before the forward pass."""
        start = time.monotonic()
        self.mover.follow(order, start)
        self.stall_seconds += time.monotonic() - start

    def after_step(self, *, rows: int, received_L: NDArray[np.int64], expert_seconds: float) -> None:
        """Count a step; the window that it ends goes to rank 0."""
        loads = self.meter.after_step(rows=rows, received_L=received_L, expert_seconds=expert_seconds)
        if loads is not None:
            self.send(0, loads)

    def now(self) -> PlacementNow:
        """The placement in use, and the newest decision (rank 0)."""
        assert self.controller is not None
        newest = self.controller.newest
        return msgspec.structs.replace(
            placement_now(self.instance, self.placement),
            live=True,
            action=newest.action if newest.why else "",
            why=newest.why,
            moves=moves_from(self.controller.moves).T.tolist(),
            balancedness=newest.balancedness,
            bound=newest.bound,
            gap=newest.gap,
        )

    def status(self, now: float) -> BalancingStatus:
        """For the metrics."""
        mover, controller = self.mover, self.controller
        mine = BalancingStatus(
            epoch=self.epoch,
            moves=mover.moves,
            moved_bytes=mover.moved_bytes,
            stall_seconds=self.stall_seconds,
            aborted=mover.aborted,
        )
        if controller is None:
            return mine
        return msgspec.structs.replace(
            mine,
            stalled=controller.stalled,
            decided_seconds=now - controller.decided,
            balancedness=controller.balancedness,
            balancedness_p5=controller.balancedness_p5,
            slot_skew=controller.slot_skew,
        )

    def close(self) -> None:
        """End the threads and the solver."""
        self.mover.close()
        if self.solver is not None:
            self.solver.close()


def placement_now(instance: str, placement: Placement) -> PlacementNow:
    """A placement, no decision."""
    return PlacementNow(
        instance=instance,
        epoch=placement.epoch,
        digest=placement.digest,
        num_ranks=placement.num_ranks,
        slot_to_expert=placement.slot_to_expert_LS.tolist(),
    )
