"""The rate at which ranks run prompts: a capacity, measured only while something waits for them.

Pure: `now` is an argument, seconds of any monotonic clock. Knows requests by their number and cost alone.
"""

from collections import deque
from dataclasses import dataclass, field

RATE_SECONDS = 10.0
LEAST_BUSY = 0.25


@dataclass(slots=True)
class BusyRate:
    """Of `ranks` ranks, for which `waiting` requests wait. A busy second is one of all ranks."""

    ranks: int
    waiting: int = 0
    _starts: deque[tuple[float, float]] = field(default_factory=deque)  # (busy seconds until then, tokens)
    _busy: float = 0.0
    _busy_at: float = 0.0

    def arrive(self, now: float) -> None:
        """One more request waits."""
        self._advance(now)
        self.waiting += 1

    def leave(self, now: float) -> None:
        """One waits no more."""
        self._advance(now)
        self.waiting -= 1

    def start(self, now: float, tokens: float) -> None:
        """One waits no more, as a rank has turned to it; it takes so many tokens."""
        self.leave(now)
        self._starts.append((self._busy, tokens))

    def per_second(self, now: float) -> float:
        """Tokens of requests started per busy second, of the last `RATE_SECONDS` of them; 0 until known."""
        self._advance(now)
        begin = max(0.0, self._busy - RATE_SECONDS)
        while self._starts and self._starts[0][0] < begin:
            self._starts.popleft()
        seconds = self._busy - begin
        return sum(tokens for _, tokens in self._starts) / seconds if seconds > LEAST_BUSY else 0.0

    def _advance(self, now: float) -> None:
        """Move the busy clock: it runs at the fraction of the ranks that have something waiting for them."""
        self._busy += max(0.0, now - self._busy_at) * min(self.waiting, self.ranks) / self.ranks
        self._busy_at = max(now, self._busy_at)
