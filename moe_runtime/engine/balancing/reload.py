"""Reloader: one rank's part in going over to the weights of another checkpoint, a transaction of all ranks.

1. prepare: a frontend names the checkpoint. All ranks of an instance begin in the same step, when no expert
   is on the move. From then to the end none begins to move, as each slot's new weights are read for the
   expert that it holds.
2. stage: a thread reads all weights of this rank into memory of their own, beside the forward passes.
3. commit: when every rank of every instance is ready, the frontend says so, and `agree` names the step in
   which the ranks copy what they read over the weights in use, at the addresses that these have.

Until then the old weights serve, and the failure of any rank, or of the frontend, has all ranks of an
instance drop what they read in the same step.

LOCAL: nothing here waits for another rank, or for the thread.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moe_runtime.engine.agree import NO_OFFER, MoveOffer, MoveOrder, MovePhase
from moe_runtime.engine.balancing.wire import FinishReload, Reload, ReloadAnswer, ReloadState
from moe_runtime.errors import MoeRuntimeError
from moe_runtime.placement.placement import Placement

ATTEMPT_SECONDS = 3600.0  # after which an attempt is dropped, as its frontend must be gone
Weights = Mapping[str, Tensor]
Read = Callable[[Path, Placement, Callable[[], bool]], Weights]
log = logging.getLogger("moe_runtime.reload")


@dataclass(slots=True)
class _Attempt:
    """`staged` from the begin on; `wanted`: the frontend asks for the commit; `why` it failed, if here."""

    message: Reload
    deadline: float
    staged: "Future[Weights] | None" = None
    told: bool = False
    wanted: bool = False
    failed: bool = False
    why: str = ""

    def fail(self, why: str) -> None:
        if not self.failed:
            self.failed, self.why = True, why


class Reloader:
    """`weights` are those in use, by parameter; `read` gives those of another checkpoint for a placement, or
    raises soon after they are no longer wanted, which its last argument tells.

    version, path  of the weights in use: those of the Reload that brought them; 0 and empty before the first
    """

    def __init__(self, instance: str, rank: int, weights: Weights, read: Read) -> None:
        self.version, self.path = 0, ""
        self._instance, self._rank = instance, rank
        self._weights, self._read = weights, read
        self._attempt: _Attempt | None = None
        self._thread: threading.Thread | None = None
        self._answers: list[tuple[int, ReloadAnswer]] = []

    @property
    def pending(self) -> bool:
        """An attempt is on its way, so no expert may begin to move."""
        return self._attempt is not None

    @property
    def begun(self) -> bool:
        """Weights are being read, or are, for the experts that the slots hold."""
        return self._attempt is not None and self._attempt.staged is not None

    @property
    def reading(self) -> bool:
        """A thread is at work whose end nobody announces."""
        a = self._attempt
        return a is not None and not a.told and (a.staged is not None or not self._may_begin)

    @property
    def busy(self) -> bool:
        """Something has to be agreed, so steps are wanted."""
        a = self._attempt
        return a is not None and (a.wanted or a.failed or (a.staged is None and self._may_begin))

    def prepare(self, message: Reload, now: float) -> None:
        """Take a wish; refused while there is another."""
        if self._attempt is not None:
            self._answer(message, "failed", "another reload is on its way")
            return
        self._attempt = _Attempt(message, now + ATTEMPT_SECONDS)

    def finish(self, message: FinishReload) -> None:
        """The frontend has heard from all ranks, or does not want to any more."""
        a = self._attempt
        if a is not None and a.message.version == message.version:
            a.wanted = message.commit
            if not message.commit:
                a.fail(message.why)

    def poll(self, now: float) -> list[tuple[int, ReloadAnswer]]:
        """What to tell frontends: that the weights are staged, in use, or dropped."""
        a = self._attempt
        if a is not None and not a.failed:
            if now > a.deadline:
                a.fail(f"not over within {ATTEMPT_SECONDS:g} s")
            elif a.staged is not None and a.staged.done() and not a.told:
                a.told = True
                error = a.staged.exception()
                if error is None:
                    self._answer(a.message, "staged")
                else:
                    kind = "" if isinstance(error, MoeRuntimeError) else f"{type(error).__name__}: "
                    a.fail(f"{kind}{error}")
        answers, self._answers = self._answers, []
        return answers

    def offer(self) -> MoveOffer:
        """What this rank proposes for the next step, if no expert is on the move."""
        a = self._attempt
        if a is None:
            return NO_OFFER
        ticket = a.message.version
        if a.failed:
            return MoveOffer(ticket, MovePhase.STAGING, failed=True)
        if a.staged is None:
            return MoveOffer(ticket, MovePhase.READY) if self._may_begin else NO_OFFER
        return MoveOffer(ticket, MovePhase.STAGED) if a.wanted else NO_OFFER

    def due(self, order: MoveOrder) -> bool:
        """All weights change in this step."""
        return self._attempt is not None and order.commit == self._attempt.message.version

    def follow(self, order: MoveOrder, placement: Placement) -> None:
        """Do what was agreed, before the step's forward pass; `placement` is the one in use."""
        a = self._attempt
        if a is None:
            return
        if order.abort:
            log.warning("reload of %s dropped: %s", a.message.path, a.why or "another rank failed")
            self._answer(a.message, "failed", a.why)
            self._attempt = None
        elif order.begin == a.message.version:
            a.staged = Future()
            self._thread = threading.Thread(
                target=self._stage, args=(a, a.staged, placement), name="reload", daemon=True
            )
            self._thread.start()
        elif self.due(order):
            self._commit(a)

    def close(self) -> None:
        """Wait for the thread to end: a process that exits while torch is at work in one is aborted."""
        self._attempt = None
        if self._thread is not None:
            self._thread.join()

    # -- inside -------------------------------------------------------------------------------

    @property
    def _may_begin(self) -> bool:
        """No thread of a dropped attempt still reads: memory is asked for two sets of weights, not three."""
        return self._thread is None or not self._thread.is_alive()

    def _stage(self, attempt: _Attempt, staged: "Future[Weights]", placement: Placement) -> None:
        """The thread."""
        try:
            staged.set_result(
                self._read(Path(attempt.message.path), placement, lambda: self._attempt is attempt)
            )
        except Exception as error:  # noqa: BLE001 - told to the step loop, which rolls back
            staged.set_exception(error)

    def _commit(self, attempt: _Attempt) -> None:
        assert attempt.staged is not None
        staged = attempt.staged.result()
        assert staged.keys() == self._weights.keys()
        for name, weight in self._weights.items():
            weight.data.copy_(staged[name])
        self.version, self.path = attempt.message.version, attempt.message.path
        self._answer(attempt.message, "in use")
        self._attempt = None

    def _answer(self, message: Reload, state: ReloadState, why: str = "") -> None:
        answer = ReloadAnswer(
            instance=self._instance, rank=self._rank, version=message.version, state=state, why=why
        )
        self._answers.append((message.frontend, answer))
