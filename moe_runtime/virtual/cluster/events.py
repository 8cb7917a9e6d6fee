"""Events that a user scripts into a simulation. Pure data; times are seconds after its start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """One rank takes `factor` >= 1 times as long for the steps that begin within [start, end)."""

    instance: str
    rank: int
    start: float
    end: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An instance dies, as it does when any of its ranks dies. `down`: seconds until it serves again, with
    empty caches and where the plan has its experts start; None: it does not come back.
    """

    instance: str
    at: float
    down: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """The balancer of an instance is asked to decide now, and to move experts whether it pays or not."""

    instance: str
    at: float


ScriptedEvent = Slowdown | Failure | Rebalance
