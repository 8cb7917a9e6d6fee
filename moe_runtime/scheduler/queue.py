"""WaitingQueue: sequences that want a row, the most urgent first. Pure.

A priority is worth `AGING_STEPS` steps of waiting: a sequence is as urgent as one of priority 0 that
came `priority * AGING_STEPS` steps later. So urgency never changes while a sequence waits, and with
priorities in a bounded range everything that waits is in the end the most urgent of all.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from moe_runtime.scheduler.sequences import Sequence

AGING_STEPS = 1000


class WaitingQueue:
    """Ordered by (urgency, arrival), which `arrive` sets once and for all."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence:
        """The most urgent one; the queue is not empty."""
        return self._sequences[0]

    def arrive(self, sequence: Sequence, step: int) -> None:
        """A new sequence came at `step`."""
        sequence.urgency = step + sequence.request.priority * AGING_STEPS
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence waits again, as urgent as it ever was."""
        insort(self._sequences, sequence, key=order)

    def remove(self, sequence: Sequence) -> None:
        """The sequence waits no more; it is in the queue."""
        index = bisect_left(self._sequences, order(sequence), key=order)
        assert self._sequences[index] is sequence
        del self._sequences[index]


def order(sequence: Sequence) -> tuple[int, int]:
    """What is smaller goes first."""
    return sequence.urgency, sequence.arrival
