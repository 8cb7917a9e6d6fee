"""Mover: one rank's part in going from one placement to another, as transactions that all ranks agree on.

An attempt is cut into units: the layers that only split anew, together; then one layer at a time. All ranks
begin a unit in the same step, copy the weights of its slots into each other's staging areas beside the steps
that follow, and commit it in the same later step, before its forward pass: staging -> slots, then the slot
table, and the epoch grows by one. Until then the old placement serves, and any rank that fails, or finds that
staging takes too long, has all of them drop the attempt.

Why nothing is read too early or too late: a unit begins only when every rank offers it, so after every rank
has committed the one before and emptied its staging area; weights are read from slots of the unit's layer,
which change at its commit only, when all copies of it are done.

LOCAL: nothing here waits for another rank.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_runtime.engine.agree import NO_OFFER, MoveOffer, MoveOrder, MovePhase
from moe_runtime.engine.balancing.courier import PIECE_BYTES, Courier, Piece, Staging, pieces
from moe_runtime.engine.balancing.registry import ExpertRegistry
from moe_runtime.engine.balancing.units import Unit, units_of
from moe_runtime.engine.balancing.wire import NewPlacement
from moe_runtime.expert_parallel.slot_table import SlotTable
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.stages import with_layers

TICKETS = 1 << 20  # units that an attempt may have
log = logging.getLogger("moe_runtime.balancing")


@dataclass(slots=True)
class _Attempt:
    """`ticket` is of units[0], `placement` what it leads to once it has begun."""

    number: int
    target: Placement
    units: deque[Unit]
    ticket: int
    deadline: float
    phase: MovePhase = MovePhase.READY
    placement: Placement | None = None


@dataclass(slots=True, kw_only=True)
class Mover:
    """`staging` are the areas of all ranks, in their order. At most `bytes_per_step` leave a rank per step;
    an attempt whose unit takes more than `timeout` seconds is dropped.

    moves, moved_bytes  slots filled here; `aborted` attempts dropped
    """

    rank: int
    placement: Placement
    table: SlotTable
    registry: ExpertRegistry
    staging: Sequence[Staging]
    bytes_per_step: int
    timeout: float
    courier: Courier = field(default_factory=Courier)
    moves: int = 0
    moved_bytes: int = 0
    aborted: int = 0
    failed: str = ""
    _attempt: _Attempt | None = None
    _waiting: deque[Piece] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        """An attempt is on its way."""
        return self._attempt is not None

    def aim(self, message: NewPlacement, now: float) -> None:
        """Take a new target; one that does not begin where this rank stands is left alone, with a warning."""
        if self.busy or message.base != self.placement.digest:
            log.warning("rank %d: attempt %d does not start from here", self.rank, message.attempt)
            return
        target = message.target(self.placement)
        units = deque(units_of(self.placement, target, message.moves_3M))
        if units:
            ticket = message.attempt * TICKETS + 1
            self._attempt = _Attempt(message.attempt, target, units, ticket, now + self.timeout)

    def give_up(self, reason: str) -> None:
        """Have all ranks drop the attempt on its way, if there is one."""
        if self.busy and not self.failed:
            self.failed = reason

    def offer(self, now: float) -> MoveOffer:
        """What this rank proposes for the next step."""
        attempt = self._attempt
        if attempt is None:
            return NO_OFFER
        if self.courier.error is not None:
            self.give_up(f"a copy failed: {self.courier.error!r}")
        elif now > attempt.deadline:
            what = "began" if attempt.phase is MovePhase.READY else "was staged"
            self.give_up(f"not every rank {what} within {self.timeout:g} s")
        if self.failed:
            return MoveOffer(attempt.ticket, attempt.phase, failed=True)
        if attempt.phase is MovePhase.STAGING and self._all_here(attempt):
            attempt.phase = MovePhase.STAGED
        if attempt.phase is MovePhase.READY and not self.courier.idle:
            return NO_OFFER  # a copy of an attempt that was dropped is still in hand
        return MoveOffer(attempt.ticket, attempt.phase)

    def follow(self, order: MoveOrder, now: float) -> None:
        """Do what was agreed, before the step's forward pass."""
        attempt = self._attempt
        if order.abort:
            self._drop()
        elif attempt is not None:
            if order.begin == attempt.ticket:
                self._begin(attempt, now)
            elif order.commit == attempt.ticket:
                self._commit(attempt, now)
            self._let_go()

    def rehearse(self, neighbour: int) -> None:
        """Copy a layer's slots into another rank's staging area once, so that nothing is new later on."""
        size = min(PIECE_BYTES, self.bytes_per_step)
        for slot in range(self.registry.num_slots):
            parts = self.registry.parts(0, slot)
            self.courier.give(pieces(self.staging[neighbour], slot, parts, 0, size))

    @property
    def slot_bytes(self) -> int:
        """Of one expert in a layer."""
        return self.registry.slot_bytes

    @property
    def seconds_per_byte(self) -> float:
        """Of the copies made so far."""
        return self.courier.seconds / max(self.courier.num_bytes, 1)

    def close(self) -> None:
        self.courier.close()

    # -- inside -------------------------------------------------------------------------------

    def _all_here(self, attempt: _Attempt) -> bool:
        marks = self.staging[self.rank].marks
        return all(marks[slot] == attempt.ticket for slot in self._incoming(attempt))

    def _incoming(self, attempt: _Attempt) -> list[int]:
        """Local slots of this rank that the unit fills."""
        slot_M, n = attempt.units[0].moves_3M[1], self.registry.num_slots
        mine: list[int] = (slot_M[slot_M // n == self.rank] - self.rank * n).tolist()
        return mine

    def _begin(self, attempt: _Attempt, now: float) -> None:
        unit, n = attempt.units[0], self.registry.num_slots
        attempt.phase, attempt.deadline = MovePhase.STAGING, now + self.timeout
        attempt.placement = with_layers(self.placement, attempt.target, unit.layers)
        size = min(PIECE_BYTES, self.bytes_per_step)
        for layer, slot, source in unit.moves_3M.T.tolist():
            if source // n == self.rank:
                parts = self.registry.parts(layer, source % n)
                self._waiting += pieces(self.staging[slot // n], slot % n, parts, attempt.ticket, size)

    def _let_go(self) -> None:
        """Hand the courier what may leave in this step."""
        room, batch = self.bytes_per_step, []
        while self._waiting and len(self._waiting[0].source) <= room:
            batch.append(self._waiting.popleft())
            room -= len(batch[-1].source)
        if batch:
            self.courier.give(batch)

    def _commit(self, attempt: _Attempt, now: float) -> None:
        unit, here = attempt.units.popleft(), self.staging[self.rank]
        n, slots = self.registry.num_slots, unit.moves_3M[1]
        for slot in slots[slots // n == self.rank] % n:
            place, offset = here.place(int(slot)), 0
            for part in self.registry.parts(unit.layers[0], int(slot)):
                part[:] = place[offset : offset + len(part)]
                offset += len(part)
            self.moves += 1
            self.moved_bytes += offset
        assert attempt.placement is not None
        self.placement = attempt.placement
        self.table.update(self.placement, unit.layers)
        attempt.ticket, attempt.phase = attempt.ticket + 1, MovePhase.READY
        attempt.deadline = now + self.timeout
        if not attempt.units:
            self._attempt = None

    def _drop(self) -> None:
        if self._attempt is not None:
            self.aborted += 1
            log.warning(
                "rank %d: attempt %d to move experts was rolled back (%s); epoch %d keeps serving",
                self.rank,
                self._attempt.number,
                self.failed or "another rank failed",
                self.placement.epoch,
            )
        self._attempt, self.failed = None, ""
        self._waiting.clear()
        self.courier.drop()
