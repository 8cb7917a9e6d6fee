"""Controller: rank 0's decisions about the placement of its instance. It asks the solver and tells the ranks.

Windows of all ranks go to the solver as they are complete; what it decides goes out as a NewPlacement. One
question at a time, and none while experts move: windows that end meanwhile are added up. Never blocks.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.balancing.merge import LoadMerge, MergedWindow
from moe_runtime.engine.balancing.thinker import Answer, Question
from moe_runtime.engine.balancing.wire import NewPlacement, WindowLoads, moves_from
from moe_runtime.placement.placement import FULL_RANGE, Placement
from moe_runtime.placement.stages import starts_by_slot

SOLVER_SECONDS = 30.0  # after which the solver is started anew
log = logging.getLogger("moe_runtime.balancing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the plan. `to_fill`: slots that a placement may fill, all ranks together; `nodes` and `groups` as in
    Question.
    """

    to_fill: int
    horizon_windows: float
    min_gain: float
    nodes: int = 1
    groups: int = 1


class Solver(Protocol):
    """Answers questions in its own time: `SolverProcess`."""

    def ask(self, question: Question) -> None: ...

    def answer(self) -> Answer | None: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...


class Mover(Protocol):
    """Moves experts in its own time: `mover.Mover` of rank 0. `slot_bytes` of one expert in a layer."""

    placement: Placement

    @property
    def busy(self) -> bool: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def seconds_per_byte(self) -> float: ...

    def aim(self, message: NewPlacement, now: float) -> None: ...

    def give_up(self, reason: str) -> None: ...


@dataclass(slots=True, kw_only=True)
class Controller:
    """`send` tells the other ranks. `stalled`: a window ended and the question before is open, or failed.

    balancedness, balancedness_p5, slot_skew  of the newest window, as in BalancingStatus
    newest                                    the newest answer; `moves` of the newest that had any
    """

    merge: LoadMerge
    solver: Solver
    settings: Settings
    mover: Mover
    send: Callable[[NewPlacement], None]
    started: float
    stalled: bool = False
    balancedness: float = 1.0
    balancedness_p5: float = 1.0
    slot_skew: float = 1.0
    newest: Answer = field(default_factory=Answer)
    moves: bytes = b""
    decided: float = 0.0
    _pairs_LE: NDArray[np.float64] | None = None
    _seconds_per_pair: float = 0.0
    _forced: bool = False
    _asked_by_force: bool = False
    _asked: float | None = None
    _attempt: int = 0

    def __post_init__(self) -> None:
        self.decided = self.started

    def add(self, loads: WindowLoads) -> None:
        """A rank's part of a window has come."""
        merged = self.merge.add(loads)
        if merged is not None:
            self.observe(merged)

    def observe(self, merged: MergedWindow) -> None:
        """A window of all ranks is complete."""
        if len(merged.balancedness_W):
            self.balancedness = float(merged.balancedness_W.mean())
            self.balancedness_p5 = float(np.percentile(merged.balancedness_W, 5))
        pairs_LE = merged.pairs_LE.astype(np.float64)
        self.slot_skew = slot_skew(self.mover.placement, pairs_LE)
        self._seconds_per_pair = merged.seconds_per_pair
        self._pairs_LE = pairs_LE if self._pairs_LE is None else self._pairs_LE + pairs_LE
        if self._asked is not None and not self.stalled:
            self.stalled = True
            log.warning("the solver has not answered since the window before; the placement stays")

    def force(self) -> None:
        """Decide now, and move whether it pays or not; an attempt on its way is rolled back."""
        self._forced = True
        self.mover.give_up("another rebalance was asked for")

    def poll(self, now: float, *, hold: bool = False) -> None:
        """Take an answer, ask what there is to ask. `hold`: nothing is asked, an answer moves nothing."""
        if self._asked is not None:
            answer = self.solver.answer()
            if answer is not None:
                self._asked = None
                self._take(answer, now, hold=hold)
            elif now - self._asked > SOLVER_SECONDS:
                self._restart(f"the solver did not answer within {SOLVER_SECONDS:g} s")
        wanted = self._pairs_LE is not None or self._forced
        if wanted and self._asked is None and not self.mover.busy and not hold:
            self._ask(now)

    def move_to(self, target: Placement, moves_3M: NDArray[np.int64], now: float) -> None:
        """Have all ranks go to a placement; moves int64 [3, M] as `plan_migration` orders them."""
        self._attempt += 1
        message = NewPlacement.of(self._attempt, self.mover.placement, target, moves_3M)
        self.send(message)
        self.mover.aim(message, now)

    def question(self, pairs_LE: NDArray[np.float64] | None) -> Question:
        """What the solver has to know."""
        current = self.mover.placement
        return Question(
            pairs=b"" if pairs_LE is None else pairs_LE.tobytes(),
            num_layers=current.num_layers,
            num_experts=current.num_experts,
            num_ranks=current.num_ranks,
            epoch=current.epoch,
            slots=current.slot_to_expert_LS.tobytes(),
            starts=starts_by_slot(current).tobytes(),
            to_fill=self.settings.to_fill,
            seconds_per_pair=self._seconds_per_pair,
            seconds_per_byte=self.mover.seconds_per_byte,
            expert_bytes=self.mover.slot_bytes,
            horizon_windows=self.settings.horizon_windows,
            min_gain=self.settings.min_gain,
            force=self._forced,
            nodes=self.settings.nodes,
            groups=self.settings.groups,
        )

    # -- inside -------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        self.solver.ask(self.question(self._pairs_LE))
        self._asked_by_force = self._forced
        self._pairs_LE, self._forced, self._asked = None, False, now

    def _take(self, answer: Answer, now: float, *, hold: bool) -> None:
        if answer.ended:
            self._restart("the solver's process has ended")
            return
        if answer.error:
            self.stalled = True
            log.warning("no decision about the placement, which stays: %s", answer.error)
            return
        self.stalled, self.decided, self.newest = False, now, answer
        self.moves = answer.moves or self.moves
        if answer.action == "wait":
            return
        if hold:
            self._forced |= self._asked_by_force  # it is asked again
            return
        current = self.mover.placement
        shape = current.slot_to_expert_LS.shape
        target = Placement(
            slot_to_expert_LS=np.frombuffer(answer.slots, np.int32).reshape(shape),
            num_experts=current.num_experts,
            num_ranks=current.num_ranks,
            epoch=current.epoch + 1,
            cumulative_LS=np.frombuffer(answer.starts, np.uint16).reshape(shape),
        )
        self.move_to(target, moves_from(answer.moves), now)

    def _restart(self, why: str) -> None:
        self.stalled, self._asked = True, None
        log.warning("%s; it is started anew, and the placement stays", why)
        self.solver.restart()


def slot_skew(placement: Placement, pairs_LE: NDArray[np.float64]) -> float:
    """Load of the hottest slot / mean of the slots in use, by the split weights; mean over the layers."""
    padded = np.concatenate([pairs_LE, np.zeros((len(pairs_LE), 1))], axis=1)
    load_LS = (
        np.take_along_axis(padded, placement.slot_to_expert_LS, axis=1) * placement.share_LS / FULL_RANGE
    )
    used_L = (placement.slot_to_expert_LS >= 0).sum(axis=1)
    total_L = load_LS.sum(axis=1)
    busy = total_L > 0
    return float((load_LS.max(axis=1)[busy] * used_L[busy] / total_L[busy]).mean()) if busy.any() else 1.0
