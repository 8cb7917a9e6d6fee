"""Mailbox: numbered all-to-all transfers between the ranks of one host, through shared memory.

What every shared-memory transport stands on. It owns flags, buffer reuse, waiting, deadlines and
the detection of dead ranks; it knows nothing of tokens or dtypes (and of torch). One window per
instance, created by rank 0 and opened by everybody:

    gate        1 line          what sleepers sleep on
    ranks       [R] lines       posted, pid, time of the last posts: each written by its rank only
    areas       [2F, R, bytes]  2F buffers of an area per rank, used in turn: transfer n uses n % 2F

A transfer is `begin` (its areas may be written: the own one, or a part of another's that nobody else
writes), `post`, `wait` (every live rank has posted it: its areas may be read) and `finish` (this rank
reads them no more). A rank may have F transfers begun and not finished, two by default: one per
micro-batch; with F = 1 the areas are the usual pair of ping-pong buffers.

Why a fast rank cannot overwrite what a slow one still reads. Rule: n begins only after n - F is
finished. Let p begin n, which uses the areas of n - 2F. So p has finished n - F, hence has waited for
it, hence every rank q had posted n - F, hence begun it, hence (the rule at q) finished n - 2F. So no
acknowledgements travel.

Nobody spins, and a sleeper is woken once, not once per peer, which is what keeps more ranks than cores
from thrashing: a rank posts its number, then (behind a full barrier) looks at all numbers, and only a
rank that sees all of them at n opens the gate. Of any two ranks at least one sees the other's number,
so the last one opens; sleepers look again every `LOOK_AGAIN` seconds anyway, and for dead peers then.
"""

import os
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.errors import PeerLost, StepTimeout
from moe_runtime.expert_parallel.where import StepAndLayer, Where
from moe_runtime.shared_memory import CACHE_LINE, Flag, ProcessWatch, Window, WindowAddress

IN_FLIGHT = 2
LOOK_AGAIN = 0.1
_PAGE = 4096
_POSTED, _PID, _TIMES = 0, 1, 2
_WORDS = CACHE_LINE // 8


@dataclass(slots=True)
class Transfer:
    """One transfer of one rank, from `begin` to `finish`.

    sequence     its number, the same on every rank
    areas        uint8 [R, area_bytes]: the buffer of this transfer, an area per rank
    posted_at    seconds (time.monotonic) when this rank posted
    complete_at  when the last live rank posted, known after `wait`: the transfer was under way until then
    """

    _mailbox: "Mailbox"
    sequence: int
    operation: str
    step: int
    layer: int
    areas: NDArray[np.uint8]
    posted_at: float = 0.0
    complete_at: float = 0.0

    @property
    def half(self) -> int:
        """Which of the mailbox' 2F buffers this transfer uses."""
        return self.sequence % self._mailbox.num_halves

    def post(self) -> None:
        """LOCAL: what this rank wrote is complete; readers may have it."""
        self._mailbox._post(self)

    def wait(self) -> None:
        """COLLECTIVE: block until every live rank has posted this transfer.

        Raises StepTimeout after the mailbox' deadline, PeerLost as soon as a rank waited for is
        seen to be dead; both name step, layer, operation and the ranks.
        """
        self._mailbox._wait(self)

    def finish(self) -> None:
        """LOCAL: this rank reads the areas no more."""
        self._mailbox._unfinished.remove(self.sequence)


class Mailbox:
    """COLLECTIVE: every rank begins, posts, waits for and finishes the same transfers in the same order.

    `alive` (one flag per rank, all true at first) may be changed by the owner, on every rank between the same
    two transfers: ranks that are not alive are not waited for.
    """

    def __init__(
        self,
        window: Window,
        *,
        rank: int,
        num_ranks: int,
        area_bytes: int,
        timeout: float,
        where: Where | None = None,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        assert window.size >= self.window_bytes(num_ranks, area_bytes, in_flight), "window too small"
        assert 1 <= in_flight <= (_WORDS - _TIMES) // 2
        self.rank, self.num_ranks, self.timeout = rank, num_ranks, timeout
        self.num_halves = 2 * in_flight
        self.alive = [True] * num_ranks
        self.where: Where = where or StepAndLayer()
        self._window = window
        self._in_flight = in_flight
        self._next = 0
        self._unfinished: list[int] = []
        self._peers: dict[int, ProcessWatch] = {}
        self._gate = Flag(window.array(np.int32, (1,)))
        # Words of the ranks' lines; of a few of them, a memoryview is read faster than an array.
        self._words = memoryview(window.memory)[CACHE_LINE : CACHE_LINE * (1 + num_ranks)].cast("q")
        self._barrier = Flag(np.zeros(1, np.int32))
        shape = (self.num_halves, num_ranks, _rounded(area_bytes))
        areas = window.array(np.uint8, shape, offset=_rounded(CACHE_LINE * (1 + num_ranks)))
        self.areas: NDArray[np.uint8] = areas.view(np.uint8)
        self._words[rank * _WORDS + _PID] = os.getpid()

    @staticmethod
    def window_bytes(num_ranks: int, area_bytes: int, in_flight: int = IN_FLIGHT) -> int:
        """Size of the window; pages that are never written take no memory."""
        head = _rounded(CACHE_LINE * (1 + num_ranks))
        return head + 2 * in_flight * num_ranks * _rounded(area_bytes)

    @classmethod
    def create_window(cls, *, num_ranks: int, area_bytes: int, in_flight: int = IN_FLIGHT) -> Window:
        """LOCAL: rank 0 creates the window and publishes its address."""
        return Window.create("moe-runtime-mail", cls.window_bytes(num_ranks, area_bytes, in_flight))

    @classmethod
    def open(
        cls,
        address: WindowAddress,
        *,
        rank: int,
        num_ranks: int,
        area_bytes: int,
        timeout: float,
        where: Where | None = None,
        in_flight: int = IN_FLIGHT,
    ) -> "Mailbox":
        """LOCAL: OSError when the process that created the window is gone."""
        return cls(
            Window.open(address),
            rank=rank,
            num_ranks=num_ranks,
            area_bytes=area_bytes,
            timeout=timeout,
            where=where,
            in_flight=in_flight,
        )

    def begin(self, operation: str) -> Transfer:
        """LOCAL: the next transfer; `operation` names it in errors."""
        n = self._next
        oldest = self._unfinished[0] if self._unfinished else n
        assert n - oldest < self._in_flight, (
            f"{operation}: transfer {oldest} is not finished, and {self._in_flight} may be in flight"
        )
        self._next = n + 1
        self._unfinished.append(n)
        areas = self.areas[n % self.num_halves]
        return Transfer(self, n, operation, self.where.step, self.where.layer, areas)

    def close(self) -> None:
        """LOCAL: close descriptors; views of the window keep the memory."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._window.close()

    def _post(self, transfer: Transfer) -> None:
        transfer.posted_at = time.monotonic()
        line = self.rank * _WORDS
        self._words[line + _TIMES + transfer.half] = int(transfer.posted_at * 1e9)
        self._words[line + _POSTED] = transfer.sequence + 1
        # Store, full barrier, load: of two ranks that post at once, one sees both numbers.
        self._barrier.wake()
        if not self._late(transfer.sequence):
            self._gate.set((transfer.sequence + 1) & 0x7FFFFFFF)

    def _wait(self, transfer: Transfer) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            seen = self._gate.value
            late = self._late(transfer.sequence)
            if not late:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                raise StepTimeout(
                    step=transfer.step,
                    layer=transfer.layer,
                    operation=transfer.operation,
                    ranks=late,
                    seconds=self.timeout,
                )
            slept = time.monotonic()
            self._gate.sleep(seen, min(left, LOOK_AGAIN))
            if time.monotonic() - slept >= LOOK_AGAIN:
                self._check_alive(transfer)
        times = self._words[_TIMES + transfer.half :: _WORDS]
        transfer.complete_at = 1e-9 * max(t for t, alive in zip(times, self.alive, strict=True) if alive)

    def _late(self, sequence: int) -> list[int]:
        """Live ranks that have not posted the transfer."""
        posted = self._words[_POSTED::_WORDS]
        return [r for r, n in enumerate(posted) if n <= sequence and self.alive[r]]

    def _check_alive(self, transfer: Transfer) -> None:
        dead = [r for r in self._late(transfer.sequence) if self._is_dead(r)]
        # One that posted before it died is not waited for.
        dead = [r for r in dead if r in self._late(transfer.sequence)]
        if dead:
            raise PeerLost.in_step(
                step=transfer.step, layer=transfer.layer, operation=transfer.operation, ranks=dead
            )

    def _is_dead(self, rank: int) -> bool:
        """Whether the process has ended, reaped or not. A rank that never came is only late."""
        pid = self._words[rank * _WORDS + _PID]
        if not pid:
            return False
        if rank not in self._peers:
            self._peers[rank] = ProcessWatch(pid)
        return self._peers[rank].gone


def _rounded(num_bytes: int) -> int:
    """Up to whole pages."""
    return -(-num_bytes // _PAGE) * _PAGE
