"""Network: copies of KV between ranks in virtual time, sharing the links at their two ends.

Every rank has one link out and one in. A copy runs at 1 / n of its speed alone, n the number of copies on
the busier of its two links. Knows nothing of blocks or leases.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_runtime.scheduler.sequences import Sequence

RankName = tuple[str, int]
_Choice = Callable[["Copy"], bool]


@dataclass(slots=True, eq=False)
class Copy:
    """A sequence's KV. `left` seconds remain, were it alone; it runs at `rate` since `since`."""

    source: RankName
    target: RankName
    sequence: Sequence
    left: float
    since: float
    rate: float = 1.0
    version: int = 0


@dataclass(slots=True)
class Network:
    """All copies under way."""

    _links: defaultdict[tuple[str, RankName], dict[Copy, None]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _ends: list[tuple[float, int, int, Copy]] = field(default_factory=list)
    _pushed: int = 0

    def start(
        self, source: RankName, target: RankName, sequence: Sequence, seconds: float, now: float
    ) -> None:
        """Begin a copy that takes `seconds` alone."""
        copy = Copy(source, target, sequence, seconds, now)
        for link in _links_of(copy):
            self._links[link][copy] = None
        self._share(copy, now)

    def next_end(self) -> float | None:
        """When the next copy ends, if no other begins."""
        while self._ends and self._ends[0][2] != self._ends[0][3].version:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def pop_ended(self, now: float) -> Copy | None:
        """A copy that has ended by now, the earliest first."""
        end = self.next_end()
        if end is None or end > now:
            return None
        copy = heapq.heappop(self._ends)[3]
        self._remove(copy, end)
        return copy

    def break_source(self, instance: str, now: float) -> list[Copy]:
        """An instance is gone: copies from it end at once, without what they were to bring."""
        return self._break(now, lambda copy: copy.source[0] == instance)

    def break_target(self, instance: str, now: float) -> list[Copy]:
        """An instance is gone: copies to it end."""
        return self._break(now, lambda copy: copy.target[0] == instance)

    # -- inside -------------------------------------------------------------------------------

    def _break(self, now: float, chosen: _Choice) -> list[Copy]:
        broken = {copy: None for on_link in self._links.values() for copy in on_link if chosen(copy)}
        for copy in broken:
            self._remove(copy, now)
        return list(broken)

    def _remove(self, copy: Copy, now: float) -> None:
        copy.version += 1
        for link in _links_of(copy):
            on_link = self._links[link]
            del on_link[copy]
            if not on_link:
                del self._links[link]
        self._share(copy, now)

    def _share(self, changed: Copy, now: float) -> None:
        """Give every copy on the links of `changed` its share of them."""
        out, into = _links_of(changed)
        links = self._links
        for copy in {**links.get(out, {}), **links.get(into, {})}:
            busiest = max(len(links[link]) for link in _links_of(copy))
            copy.left = max(0.0, copy.left - (now - copy.since) * copy.rate)
            copy.since, copy.rate = now, 1.0 / busiest
            copy.version += 1
            self._pushed += 1
            heapq.heappush(self._ends, (now + copy.left * busiest, self._pushed, copy.version, copy))


def _links_of(copy: Copy) -> tuple[tuple[str, RankName], tuple[str, RankName]]:
    return ("out", copy.source), ("in", copy.target)
