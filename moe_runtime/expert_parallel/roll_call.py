"""RollCall: who has come to a collective, for transports that fail without saying whom they waited for.

Each rank of a host counts the collectives it has begun in a line of shared memory; a rank whose
collective failed reads the others' counts and looks which processes have ended. It transports
nothing and knows nothing of tokens. Layout: [R] lines of count, pid; R ranks of this host.
"""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn

from moe_runtime.errors import PeerLost, StepTimeout
from moe_runtime.expert_parallel.where import StepAndLayer, Where
from moe_runtime.shared_memory import CACHE_LINE, ProcessWatch, Window, WindowAddress

# A connection breaks a little before the process that held it counts as ended.
DYING_SECONDS = 0.3
_LOOK = 0.02
_WORDS = CACHE_LINE // 8
_COUNT, _PID = 0, 1


class RollCall:
    """The lines of the ranks `here` (numbers within the instance of `num_ranks`), `rank` being our own."""

    def __init__(
        self, window: Window, *, rank: int, here: range, num_ranks: int, where: Where | None = None
    ) -> None:
        assert rank in here
        assert window.size >= len(here) * CACHE_LINE, "window too small"
        self.where: Where = where or StepAndLayer()
        self._rank, self._here = rank, here
        self._elsewhere = [r for r in range(num_ranks) if r not in here]
        self._window = window
        self._words = memoryview(window.memory)[: len(here) * CACHE_LINE].cast("q")
        self._line = (rank - here.start) * _WORDS
        self._words[self._line + _PID] = os.getpid()

    @staticmethod
    def create_window(num_ranks: int) -> Window:
        """LOCAL: one rank of the host creates the window and publishes its address."""
        return Window.create("moe-runtime-roll", num_ranks * CACHE_LINE)

    @classmethod
    def open(
        cls, address: WindowAddress, *, rank: int, here: range, num_ranks: int, where: Where | None = None
    ) -> "RollCall":
        """LOCAL: OSError when the process that created the window is gone."""
        return cls(Window.open(address), rank=rank, here=here, num_ranks=num_ranks, where=where)

    def begin(self, operation: str) -> "Call":
        """LOCAL: this rank comes to its next collective."""
        self._words[self._line + _COUNT] += 1
        return Call(self, operation, self._words[self._line + _COUNT], self.where.step, self.where.layer)

    def close(self) -> None:
        """LOCAL: views of the window keep the memory."""
        self._window.close()

    def behind(self, count: int) -> list[int]:
        """Ranks of this host that have not come to collective number `count`."""
        counts = self._words[_COUNT::_WORDS]
        return [r for r, n in zip(self._here, counts, strict=True) if n < count]

    def ended(self) -> list[int]:
        """Ranks of this host whose process has ended, reaped or not. One that never came is only late."""
        pids = self._words[_PID::_WORDS]
        return [r for r, pid in zip(self._here, pids, strict=True) if pid and _has_ended(pid)]

    @property
    def elsewhere(self) -> list[int]:
        """Ranks of other hosts, of which nothing is known here."""
        return self._elsewhere


class Call:
    """One collective of one rank: number `count`, begun in the place that the engine was in then."""

    def __init__(self, roll: RollCall, operation: str, count: int, step: int, layer: int) -> None:
        self._roll, self._operation, self._count = roll, operation, count
        self._step, self._layer = step, layer
        self._began = time.monotonic()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What a collective raises in here becomes a StepTimeout or PeerLost that names the missing ranks.

        An error while nobody is missing is nobody else's: it stays what it is.
        """
        try:
            yield
        except RuntimeError as error:
            self._explain(error, time.monotonic() - self._began)

    def _explain(self, error: RuntimeError, seconds: float) -> NoReturn:
        """Of the ranks that did not come those that died are to blame, then those that are late.

        If all of this host came, then those of others: gloo's text tells whether they are late or gone.
        """
        roll, deadline = self._roll, time.monotonic() + DYING_SECONDS
        while not (dead := [r for r in roll.ended() if r in roll.behind(self._count)]):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK)
        # One that died in the middle of the collective had come to it.
        dead = dead or ([] if roll.behind(self._count) else roll.ended())
        step, layer, operation = self._step, self._layer, self._operation
        if dead:
            raise PeerLost.in_step(step=step, layer=layer, operation=operation, ranks=dead) from error
        late = roll.behind(self._count)
        if not late and roll.elsewhere and "timed out" not in str(error).lower():
            raise PeerLost.in_step(
                step=step, layer=layer, operation=operation, ranks=roll.elsewhere, what="connection broken"
            ) from error
        if late := late or roll.elsewhere:
            raise StepTimeout(
                step=step, layer=layer, operation=operation, ranks=late, seconds=seconds
            ) from error
        raise error


class NoCall:
    """A collective of ranks that keep no roll."""

    @staticmethod
    def explained() -> AbstractContextManager[None]:
        return nullcontext()


NO_CALL = NoCall()


def _has_ended(pid: int) -> bool:
    watch = ProcessWatch(pid)
    try:
        return watch.gone
    finally:
        watch.close()
