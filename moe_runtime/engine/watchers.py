"""Watchers: which frontends want to hear how a rank is doing, and when they should. Pure.

`now` is an argument. A status is due every so often, and soon after the load changed.
"""

from dataclasses import dataclass, field

SOONEST_SECONDS = 0.05


@dataclass(slots=True)
class Watchers:
    """Frontends by the seconds between their statuses."""

    _every: dict[int, float] = field(default_factory=dict)
    _sent: dict[int, float] = field(default_factory=dict)
    _load: dict[int, object] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._every)

    def watch(self, frontend: int, seconds: float) -> None:
        """The frontend wants a status every `seconds`; 0: no more."""
        if seconds > 0:
            self._every[frontend] = seconds
            self._sent[frontend] = float("-inf")
        else:
            self._every.pop(frontend, None)

    def due(self, now: float, load: object) -> list[int]:
        """Frontends to tell now; they count as told. `load` is compared with what they last heard."""
        out = []
        for frontend, seconds in self._every.items():
            wait = seconds if load == self._load.get(frontend) else min(seconds, SOONEST_SECONDS)
            if now - self._sent[frontend] >= wait:
                out.append(frontend)
                self._sent[frontend], self._load[frontend] = now, load
        return out

    def patience(self, now: float) -> float:
        """Seconds until some frontend is due though nothing changes."""
        waits = (self._sent[f] + seconds - now for f, seconds in self._every.items())
        return max(0.0, min(waits, default=float("inf")))
