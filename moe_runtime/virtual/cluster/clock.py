"""Clock: what happens when, in virtual time. Ties are broken by kind, then by who was first to be told."""

import heapq
from collections.abc import Callable
from enum import IntEnum


class Kind(IntEnum):
    """At one moment results come first, then what comes from outside, then turns that see both."""

    RESULT = 0
    OUTSIDE = 1
    TURN = 2


class Clock:
    """`now` is the time of the event that runs; `num_events` were scheduled so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, Kind, int, Callable[[], None]]] = []
        self.num_events = 0

    def at(self, time: float, kind: Kind, action: Callable[[], None]) -> None:
        """Have something done at a time that is not over."""
        assert time >= self.now, f"{time} is over at {self.now}"
        self.num_events += 1
        heapq.heappush(self._events, (time, kind, self.num_events, action))

    def peek(self) -> float | None:
        """When the next event is due; None: never."""
        return self._events[0][0] if self._events else None

    def step(self) -> None:
        """Run the next event."""
        self.now, _, _, action = heapq.heappop(self._events)
        action()
