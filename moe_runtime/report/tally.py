"""Tallies: what a deployment did in the window, added up, before anything is divided by anything.

Whoever ran or simulated the steps makes them; `deployment.describe` turns them into a section of the report.
Pure data. `Evidence` is all that the report asks of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_runtime.report.facts import DeploymentFacts, Gaps, Span
from moe_runtime.report.outcomes import RequestOutcome
from moe_runtime.report.schema import LayerBalance, Percentiles
from moe_runtime.report.schema_time import Attribution, Balancing, RankLoads, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTally:
    """The steps of one rank. `seconds`: inside steps; `kv_peak`: blocks, None if they were never counted."""

    instance: str
    rank: int
    steps: int
    seconds: float
    decode_rows: int
    prefill_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int
    kv_peak: int | None

    @property
    def rows(self) -> int:
        """Rows run."""
        return self.decode_rows + self.prefill_tokens + self.recomputed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What ranks sent to other ranks; None: not counted, `why` then says so of `{what}`."""

    dispatched_rows: int | None
    dispatched_bytes: int | None
    combined_bytes: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentTally:
    """The steps of a deployment that ended in the window.

    ranks               in the order of the plan
    steps               of all instances together; a step of several ranks is one
    fill_sum, fill_steps  step fills added up, and how many
    modes, reasons      agreed steps by dispatch mode, and by why they ran as one or two micro-batches
    overlapped          agreed steps that ran as two
    kv_mean             blocks in use, mean over ranks and steps; None: never counted
    phases              seconds by phase, of all ranks; empty: not timed by phase
    transport_busy, transport_waited  seconds of all ranks; None: not timed
    """

    ranks: tuple[RankTally, ...]
    steps: int
    fill_sum: float
    fill_steps: int
    modes: Mapping[str, int]
    reasons: Mapping[str, int]
    overlapped: int
    kv_mean: float | None
    sent: Sent
    phases: Mapping[str, float]
    transport_busy: float | None
    transport_waited: float | None
    balancedness: tuple[LayerBalance, ...]
    attribution: Attribution | None
    rank_loads: RankLoads | None
    balancing: Balancing | None


class Evidence(Protocol):
    """What a run left behind. Times are seconds on the run's clock."""

    @property
    def outcomes(self) -> Sequence[RequestOutcome]: ...

    @property
    def last_step_end(self) -> float | None: ...

    def busy(self, span: Span) -> bool:
        """A token arrived or a step ended in it."""

    def gaps_ms(self, arrivals: Span) -> Percentiles | None:
        """Gaps between consecutive tokens of the finished requests that arrived in it, pooled."""

    def output_tokens(self, span: Span) -> Mapping[str, int]:
        """Output tokens that arrived in it, by the instance that generated them ("" if unknown)."""

    def tally(self, facts: DeploymentFacts, span: Span, gaps: Gaps) -> DeploymentTally:
        """What the deployment did in it. Its own nulls, in balancedness and attribution, go to `gaps`."""

    def timeline(self, facts: DeploymentFacts, whole: Span) -> Timeline | None:
        """The deployment over the whole run."""

    def preemptions(self, facts: DeploymentFacts) -> int:
        """Of the whole run."""

    def prompt_tokens(self, start: float) -> tuple[int, int] | None:
        """(computed, cached) prompt tokens that ranks counted from `start` on; None: no rank counted."""
