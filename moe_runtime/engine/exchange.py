"""The transport of step agreement on one host: proposals in a shared window, no spinning.

Each rank posts its vector into one of two buffers (by parity of the step) and then raises its
flag. A rank posts step n+2 only after it has read all of step n+1, which every rank posts only
after reading all of step n: so two buffers are enough.

Layout: [R] cache lines with a flag and the rank's pid; then int64 [R, 2, words].
"""

import os
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.agree import vector_words
from moe_runtime.errors import PeerLost, StepTimeout
from moe_runtime.shared_memory import CACHE_LINE, Flag, ProcessWatch, Window, WindowAddress

LOOK_SECONDS = 0.25  # how often a rank that waits looks whether the others still live


class Exchange(Protocol):
    """COLLECTIVE: every rank gives its vector for step n and gets those of all ranks."""

    def __call__(self, step: int, vector: NDArray[np.int64]) -> list[NDArray[np.int64]]: ...

    def look(self, step: int) -> None:
        """LOCAL: raise PeerLost for ranks that have ended while everybody is parked in `step`."""
        ...


class LocalExchange:
    """An instance of one rank: nobody to ask."""

    def __call__(self, step: int, vector: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return [vector]

    def look(self, step: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks that did not post: those whose process has ended, and those that were only late."""

    dead: tuple[int, ...] = ()
    late: tuple[int, ...] = ()

    def check(self, step: int, seconds: float) -> None:
        """Raise PeerLost for dead ranks, else StepTimeout for late ones; return if nobody is missing."""
        if self.dead:
            raise PeerLost.in_step(step=step, layer=-1, operation="agreement", ranks=self.dead)
        if self.late:
            raise StepTimeout(step=step, operation="agreement", ranks=self.late, seconds=seconds)


NOBODY = Missing()


class SharedExchange:
    """Ranks of one host. The first of them creates the window and publishes its address.

    `here` are the ranks of this host by their number among the `num_ranks` of the instance; all by default.
    """

    def __init__(
        self, window: Window, *, rank: int, num_ranks: int, timeout: float, here: range | None = None
    ) -> None:
        self._window = window
        self._here = range(num_ranks) if here is None else here
        self._own = self._here.index(rank)
        self._timeout = timeout
        words, count = vector_words(num_ranks), len(self._here)
        self._flags = [Flag(window.array(np.int32, (1,), offset=i * CACHE_LINE)) for i in range(count)]
        self._pids = [window.array(np.int64, (1,), offset=i * CACHE_LINE + 8) for i in range(count)]
        self._pids[self._own][0] = os.getpid()
        self._peers: dict[int, ProcessWatch] = {}
        vectors = window.array(np.int64, (count, 2, words), offset=count * CACHE_LINE)
        self.vectors: NDArray[np.int64] = vectors.view(np.int64)

    @staticmethod
    def window_bytes(num_ranks: int, here: int) -> int:
        """Size of the window of a host with `here` of the instance's ranks; a multiple of 8."""
        return here * (CACHE_LINE + 2 * 8 * vector_words(num_ranks))

    @classmethod
    def create_window(cls, num_ranks: int) -> Window:
        return Window.create("moe-runtime-agree", cls.window_bytes(num_ranks, num_ranks))

    @classmethod
    def open(cls, address: WindowAddress, *, rank: int, num_ranks: int, timeout: float) -> "SharedExchange":
        return cls(Window.open(address), rank=rank, num_ranks=num_ranks, timeout=timeout)

    def __call__(self, step: int, vector: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Raises StepTimeout naming the ranks that did not post in time, PeerLost naming those that died."""
        self.collect(step, vector, self._timeout).check(step, self._timeout)
        return [v.copy() for v in self.vectors[:, step % 2]]

    def look(self, step: int) -> None:
        """Raise PeerLost naming ranks of this host that have ended."""
        Missing(dead=tuple(r for i, r in enumerate(self._here) if self.has_died(i))).check(step, 0.0)

    def collect(self, step: int, vector: NDArray[np.int64], seconds: float) -> Missing:
        """Post, and wait until all ranks of this host have, which stand in `vectors[:, step % 2]` then.

        Says who is missing as soon as any of them is dead, or after `seconds`.
        """
        self.vectors[self._own, step % 2] = vector
        self._flags[self._own].set(step + 1)
        deadline = time.monotonic() + seconds
        for flag in self._flags:
            while not flag.wait(step + 1, min(deadline, time.monotonic() + LOOK_SECONDS)):
                missing = [i for i, f in enumerate(self._flags) if f.value < step + 1]
                # One that posted before it died is not waited for, so its flag is looked at once more.
                dead = [i for i in missing if self.has_died(i) and self._flags[i].value < step + 1]
                if dead:
                    return Missing(dead=tuple(self._here[i] for i in dead))
                if missing and time.monotonic() >= deadline:
                    return Missing(late=tuple(self._here[i] for i in missing))
        return NOBODY

    def has_died(self, index: int) -> bool:
        """Whether the process of this host's rank number `index` has ended. One that never came is late."""
        pid = int(self._pids[index][0])
        if pid and index not in self._peers:
            self._peers[index] = ProcessWatch(pid)
        return bool(pid) and self._peers[index].gone
