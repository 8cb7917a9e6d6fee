"""The transport of step agreement on one host: proposals in a shared window, no spinning.

Each rank posts its vector into one of two buffers (by parity of the step) and then raises its
flag. A rank posts step n+2 only after it has read all of step n+1, which every rank posts only
after reading all of step n: so two buffers are enough.

Layout: [R] cache lines with a flag and the rank's pid; then int64 [R, 2, words].
"""

import os
import time
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


class LocalExchange:
    """An instance of one rank: nobody to ask."""

    def __call__(self, step: int, vector: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return [vector]


class SharedExchange:
    """Ranks of one host. Rank 0 creates the window and publishes its address."""

    def __init__(self, window: Window, *, rank: int, num_ranks: int, timeout: float) -> None:
        self._window = window
        self._rank = rank
        self._timeout = timeout
        words = vector_words(num_ranks)
        self._flags = [Flag(window.array(np.int32, (1,), offset=r * CACHE_LINE)) for r in range(num_ranks)]
        self._pids = [window.array(np.int64, (1,), offset=r * CACHE_LINE + 8) for r in range(num_ranks)]
        self._pids[rank][0] = os.getpid()
        self._peers: dict[int, ProcessWatch] = {}
        vectors = window.array(np.int64, (num_ranks, 2, words), offset=num_ranks * CACHE_LINE)
        self._vectors: NDArray[np.int64] = vectors.view(np.int64)

    @staticmethod
    def create_window(num_ranks: int) -> Window:
        size = num_ranks * (CACHE_LINE + 2 * 8 * vector_words(num_ranks))
        return Window.create("moe-runtime-agree", size)

    @classmethod
    def open(cls, address: WindowAddress, *, rank: int, num_ranks: int, timeout: float) -> "SharedExchange":
        return cls(Window.open(address), rank=rank, num_ranks=num_ranks, timeout=timeout)

    def __call__(self, step: int, vector: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Raises StepTimeout naming the ranks that did not post in time, PeerLost naming those that died."""
        half = step % 2
        self._vectors[self._rank, half] = vector
        self._flags[self._rank].set(step + 1)
        deadline = time.monotonic() + self._timeout
        late = [r for r in range(len(self._flags)) if not self._arrived(r, step, deadline)]
        if late:
            raise StepTimeout(step=step, operation="agreement", ranks=late, seconds=self._timeout)
        return [self._vectors[r, half].copy() for r in range(len(self._flags))]

    def _arrived(self, rank: int, step: int, deadline: float) -> bool:
        """Wait for a rank's proposal; False when the deadline passes first."""
        flag = self._flags[rank]
        while not flag.wait(step + 1, min(deadline, time.monotonic() + LOOK_SECONDS)):
            if time.monotonic() >= deadline:
                return False
            pid = int(self._pids[rank][0])
            if pid and rank not in self._peers:
                self._peers[rank] = ProcessWatch(pid)
            if pid and self._peers[rank].gone and flag.value < step + 1:
                raise PeerLost.in_step(step=step, layer=-1, operation="agreement", ranks=[rank])
        return True
