"""What a report needs to know of a run besides its measurements, and the small tools of `build`.

Pure data: whoever runs the benchmark fills it from the plan, the model and the command line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_runtime.report.schema import Machine, Missing, ModelSummary, Options, Percentiles, Rate
from moe_runtime.report.schema_time import Simulation

ASKED_WINDOW_SECONDS = 60.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """A closed interval on the run's clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def contains(self, times: NDArray[np.float64]) -> NDArray[np.bool_]:
        return (times >= self.start) & (times <= self.end)

    def has(self, time: float) -> bool:
        return self.start <= time <= self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFacts:
    """A deployment as planned.

    instances           names as in the records, as `decode-0`
    expert_parallel     ranks of one instance
    kv_blocks           blocks of the primary KV group per rank
    kernels             operation -> module that runs it
    """

    name: str
    instances: tuple[str, ...]
    expert_parallel: int
    redundant_experts: int
    dispatch_backend: str
    kv_blocks: int
    kernels: Mapping[str, str]

    @property
    def ranks(self) -> int:
        return len(self.instances) * self.expert_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run.

    created         ISO 8601 time, given by the caller
    warmup_end      when the window may begin, seconds on the records' clock; None: at the first arrival
    moe_layers      global index of each column of `received_rows`
    slo             (ttft_ms, tpot_ms)
    notes           sentences the run itself wants among the warnings
    simulation      what a simulated run assumed; None: the run was measured
    """

    created: str
    version: str
    commit: str | None
    machine: Machine
    plan: dict[str, Any]
    plan_digest: str
    model: ModelSummary
    options: Options
    ranks_per_node: int
    moe_layers: tuple[int, ...]
    deployments: tuple[DeploymentFacts, ...]
    slo: tuple[float, float]
    warmup_end: float | None = None
    asked_seconds: float = ASKED_WINDOW_SECONDS
    notes: tuple[str, ...] = ()
    simulation: Simulation | None = None

    @property
    def ranks(self) -> int:
        return sum(d.ranks for d in self.deployments)


@dataclass(slots=True)
class Gaps:
    """Collects why a field is null, and what a reader should be warned of."""

    missing: list[Missing] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def null(self, path: str, reason: str) -> None:
        """The field at `path` is null, and why."""
        self.missing.append(Missing(path=path, reason=reason))

    def given(self, value: T | None, path: str, reason: str) -> T | None:
        """The value, or None with its reason noted."""
        if value is None:
            self.null(path, reason)
        return value

    def warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a total is divided by."""

    seconds: float
    ranks: int
    nodes_of_role: float
    nodes_of_all: float

    def rate(self, tokens: float) -> Rate:
        """Tokens of the window as tokens per second."""
        total = tokens / self.seconds
        return Rate(
            total=total,
            per_rank=total / self.ranks,
            per_node_of_role=total / self.nodes_of_role,
            per_node_of_all=total / self.nodes_of_all,
        )


def weighted_percentiles(values: NDArray[np.float64], counts: NDArray[np.int64]) -> Percentiles | None:
    """`percentiles` of each value repeated `counts` times, without the repeating."""
    total = int(counts.sum())
    if not total:
        return None
    order = np.argsort(values, kind="stable")
    ranked, ends = values[order], np.cumsum(counts[order])

    def at(percent: float) -> float:
        place = (total - 1) * percent / 100
        low, high = ranked[np.searchsorted(ends, [int(place), min(int(place) + 1, total - 1)], side="right")]
        return float(low + (high - low) * (place - int(place)))

    mean = float((values * counts).sum() / total)
    return Percentiles(count=total, mean=mean, p50=at(50), p90=at(90), p99=at(99))


def percentiles(values: Sequence[float] | NDArray[np.float64]) -> Percentiles | None:
    """Mean and percentiles (linear interpolation between neighbours); None of nothing."""
    if not len(values):
        return None
    data = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(data, [50, 90, 99])
    return Percentiles(
        count=len(data), mean=float(data.mean()), p50=float(p50), p90=float(p90), p99=float(p99)
    )
