"""Events that a user scripts into a simulation. Pure data; times are seconds after its start."""

from dataclasses import dataclass

from moe_runtime.virtual.cluster.times import StepTimes


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
    """An instance dies, as it does when any of its ranks dies, and does not come back."""

    instance: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Experts move, unit after unit: staged beside the steps, then put in place by a step that takes longer.

    stage_seconds   from the begin of each unit until all ranks have staged it
    commit_seconds  that the step which commits a unit takes longer
    times           step times once the last unit is committed; None: as before
    """

    instance: str
    at: float
    stage_seconds: tuple[float, ...]
    commit_seconds: float = 0.0
    times: StepTimes | None = None


ScriptedEvent = Slowdown | Failure | Rebalance
