"""Courier: copies experts' bytes into other ranks' staging areas, on a thread beside the forward pass.

Staging: one window per rank with a place for each of its slots, so one layer at a time. A place's mark is set
to the ticket of its unit once its last byte is there; who reads the mark then reads the bytes (x86-64's total
store order, as for flags). Knows nothing of placements or agreement.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_runtime.shared_memory import CACHE_LINE, Window, WindowAddress

Bytes = NDArray[np.uint8]
PIECE_BYTES = 256 << 10


class Staging:
    """One rank's staging area. `marks` int64 [slots]; `place(i)` uint8 [slot_bytes]."""

    def __init__(self, window: Window, *, num_slots: int, slot_bytes: int) -> None:
        self._window = window
        self.marks: NDArray[np.int64] = window.array(np.int64, (num_slots,)).view(np.int64)
        places = window.array(np.uint8, (num_slots, _aligned(slot_bytes)), offset=_aligned(8 * num_slots))
        self._places: Bytes = places.view(np.uint8)

    @staticmethod
    def window_bytes(num_slots: int, slot_bytes: int) -> int:
        return _aligned(8 * num_slots) + num_slots * _aligned(slot_bytes)

    @classmethod
    def create_window(cls, num_slots: int, slot_bytes: int) -> Window:
        return Window.create("moe-runtime-staging", cls.window_bytes(num_slots, slot_bytes))

    @classmethod
    def open(cls, address: WindowAddress, *, num_slots: int, slot_bytes: int) -> "Staging":
        return cls(Window.open(address), num_slots=num_slots, slot_bytes=slot_bytes)

    def place(self, index: int) -> Bytes:
        place: Bytes = self._places[index]
        return place


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


class Piece(NamedTuple):
    """Bytes to copy; afterwards `marks[place] = ticket`, if `ticket` is not 0."""

    target: Bytes
    source: Bytes
    marks: NDArray[np.int64]
    place: int
    ticket: int


def pieces(staging: Staging, index: int, parts: Sequence[Bytes], ticket: int, size: int) -> list[Piece]:
    """One slot's byte ranges on the way to a place, in pieces of at most `size` bytes; the last one marks."""
    place, offset, out = staging.place(index), 0, []
    for part in parts:
        for first in range(0, len(part), size):
            source = part[first : first + size]
            out.append(Piece(place[offset : offset + len(source)], source, staging.marks, index, 0))
            offset += len(source)
    out[-1] = out[-1]._replace(ticket=ticket)
    return out


@dataclass(slots=True)
class Courier:
    """Copies what it is given, in order. `drop` forgets what is not copied yet; a piece in hand is finished.

    `error` is what a copy raised; nothing is copied after it until `drop`. `seconds` and `num_bytes` are of
    all copies so far.
    """

    copy: Callable[[Bytes, Bytes], None] = np.copyto
    error: BaseException | None = None
    seconds: float = 0.0
    num_bytes: int = 0
    _queue: "SimpleQueue[tuple[int, list[Piece]] | None]" = field(default_factory=SimpleQueue)
    _given: int = 0
    _done: int = 0
    _round: int = 0
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="expert-courier", daemon=True)
        self._thread.start()

    def give(self, batch: list[Piece]) -> None:
        """Copy these next; returns at once."""
        self._given += 1
        self._queue.put((self._round, batch))

    @property
    def idle(self) -> bool:
        """Nothing is being copied, or waits to be."""
        return self._given == self._done

    def drop(self) -> None:
        """Copy nothing more of what was given."""
        self._round += 1
        self.error = None

    def close(self) -> None:
        """End the thread; one that hangs in a copy is left behind, as it holds nothing up."""
        self.drop()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            number, batch = item
            try:
                self._deliver(number, batch)
            except Exception as error:  # noqa: BLE001 - told to the step loop, which rolls back
                if number == self._round:
                    self.error = error
            self._done += 1

    def _deliver(self, number: int, batch: list[Piece]) -> None:
        start = time.monotonic()
        for piece in batch:
            if number != self._round or self.error is not None:
                return
            self.copy(piece.target, piece.source)
            self.num_bytes += len(piece.source)
            if piece.ticket and number == self._round:
                piece.marks[piece.place] = piece.ticket
        self.seconds += time.monotonic() - start
