"""One deployment's part of the report, from the tally of its steps and its requests' tokens. Pure."""

from dataclasses import dataclass

from moe_runtime.report.facts import Denominators, DeploymentFacts, Gaps
from moe_runtime.report.schema import Deployment, Exchange, KvUse, OverlapUse, PhaseTime, RankUse, Throughput
from moe_runtime.report.schema_time import Timeline
from moe_runtime.report.tally import DeploymentTally, RankTally

# Phases are exclusive, so they add up to the step; clocks are read at slightly different moments.
_PHASE_TOLERANCE = 0.02
_UNLOGGED = "ranks keep no log of decisions about experts: see /admin/placement and the metrics"


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens of a deployment in the window. `output` comes from the requests, the rest from the ranks."""

    new_prefill: int
    cached_prefill: int
    output: int

    def throughput(self, over: Denominators) -> Throughput:
        return Throughput(
            new_prefill=over.rate(self.new_prefill),
            cached_prefill=over.rate(self.cached_prefill),
            output=over.rate(self.output),
        )

    def plus(self, other: "Totals") -> "Totals":
        return Totals(
            self.new_prefill + other.new_prefill,
            self.cached_prefill + other.cached_prefill,
            self.output + other.output,
        )


def totals(tally: DeploymentTally, output_tokens: int) -> Totals:
    return Totals(
        new_prefill=sum(r.prefill_tokens for r in tally.ranks),
        cached_prefill=sum(r.cached_tokens for r in tally.ranks),
        output=output_tokens,
    )


def describe(
    facts: DeploymentFacts,
    tally: DeploymentTally,
    counted: Totals,
    over: Denominators,
    timeline: Timeline | None,
    gaps: Gaps,
) -> Deployment:
    """The deployment's section. Fields that could not be computed are null with a reason in `gaps`."""
    path = f"deployments.{facts.name}"
    no_steps = "no step of this deployment ended in the window"
    rank_steps = sum(r.steps for r in tally.ranks)
    mean_ms = sum(r.seconds for r in tally.ranks) * 1e3 / rank_steps if rank_steps else None
    fill = tally.fill_sum / tally.fill_steps if tally.fill_steps else None
    untimed = "only a simulation knows what bounds a step: see phases"
    return Deployment(
        name=facts.name,
        nodes=over.nodes_of_role,
        ranks=facts.ranks,
        expert_parallel=facts.expert_parallel,
        instances=facts.instances,
        redundant_experts=facts.redundant_experts,
        dispatch_backend=facts.dispatch_backend,
        dispatch_modes=dict(tally.modes),
        kernels=dict(facts.kernels),
        throughput=counted.throughput(over),
        steps=tally.steps,
        mean_step_ms=gaps.given(mean_ms, f"{path}.mean_step_ms", no_steps),
        step_fill=gaps.given(fill, f"{path}.step_fill", no_steps),
        recomputed_tokens=sum(r.recomputed_tokens for r in tally.ranks),
        preemptions=sum(r.preemptions for r in tally.ranks),
        kv=_kv_use(facts, tally, f"{path}.kv", gaps),
        balancedness=tally.balancedness,
        exchange=_exchange(tally, f"{path}.exchange", gaps),
        phases=_phases(facts, tally, gaps),
        hidden=_hidden(facts, tally, f"{path}.hidden", gaps),
        overlap=_overlap(tally, f"{path}.overlap", gaps),
        per_rank=tuple(
            _rank_use(facts, r, over.seconds, f"{path}.per_rank.{i}", gaps) for i, r in enumerate(tally.ranks)
        ),
        attribution=gaps.given(tally.attribution, f"{path}.attribution", untimed),
        timeline=gaps.given(timeline, f"{path}.timeline", "no step of this deployment was recorded"),
        rank_loads=gaps.given(tally.rank_loads, f"{path}.rank_loads", "no rows were counted by rank"),
        balancing=gaps.given(tally.balancing, f"{path}.balancing", _UNLOGGED),
    )


def _kv_use(facts: DeploymentFacts, tally: DeploymentTally, path: str, gaps: Gaps) -> KvUse:
    peaks = [r.kv_peak for r in tally.ranks if r.kv_peak is not None]
    reason = "no step of the window has a block count"
    return KvUse(
        blocks_per_rank=facts.kv_blocks,
        peak_fraction=gaps.given(
            max(peaks) / facts.kv_blocks if peaks else None, f"{path}.peak_fraction", reason
        ),
        mean_fraction=gaps.given(
            None if tally.kv_mean is None else tally.kv_mean / facts.kv_blocks,
            f"{path}.mean_fraction",
            reason,
        ),
    )


def _exchange(tally: DeploymentTally, path: str, gaps: Gaps) -> Exchange:
    rows, sent = sum(r.rows for r in tally.ranks), tally.sent
    values: dict[str, int | float | None] = {}
    for name in ("dispatched_rows", "dispatched_bytes", "combined_bytes"):
        total: int | None = getattr(sent, name)
        values[name] = total
        values[f"{name}_per_token"] = None if total is None or not rows else total / rows
        if total is None:
            reason = sent.why.format(what=name.partition("_")[2])
            gaps.null(f"{path}.{name}", reason)
            gaps.null(f"{path}.{name}_per_token", reason)
        elif not rows:
            gaps.null(f"{path}.{name}_per_token", "no tokens were run in the window")
    return Exchange(**values)  # type: ignore[arg-type]


def _phases(facts: DeploymentFacts, tally: DeploymentTally, gaps: Gaps) -> tuple[PhaseTime, ...]:
    steps = sum(r.steps for r in tally.ranks)
    if not steps:
        return ()
    told, wall = sum(tally.phases.values()), sum(r.seconds for r in tally.ranks)
    if tally.phases and abs(told - wall) > _PHASE_TOLERANCE * wall:
        gaps.warn(f"{facts.name}: the phases sum to {told:.3f} s, the steps to {wall:.3f} s")
    return tuple(
        PhaseTime(phase=name, seconds_per_step=s / steps, share=s / wall if wall else 0.0)
        for name, s in tally.phases.items()
    )


def _hidden(facts: DeploymentFacts, tally: DeploymentTally, path: str, gaps: Gaps) -> float | None:
    """1 - transport waited / transport busy."""
    if facts.expert_parallel == 1:
        reason = "no transport: the EP degree is 1"
    elif tally.transport_busy is None or tally.transport_waited is None:
        reason = f"the {facts.dispatch_backend} backend did not time its transfers in every step"
    elif tally.transport_busy <= 0:
        reason = "no transfer was under way in the window"
    else:
        return 1.0 - tally.transport_waited / tally.transport_busy
    gaps.null(path, reason)
    return None


def _overlap(tally: DeploymentTally, path: str, gaps: Gaps) -> OverlapUse:
    agreed = sum(tally.modes.values())
    fraction = tally.overlapped / agreed if agreed else None
    return OverlapUse(
        overlapped_fraction=gaps.given(fraction, f"{path}.overlapped_fraction", "no step was recorded"),
        reasons=dict(tally.reasons),
    )


def _rank_use(facts: DeploymentFacts, rank: RankTally, seconds: float, path: str, gaps: Gaps) -> RankUse:
    if not rank.steps:
        gaps.null(f"{path}.mean_decode_rows", "the rank took no step in the window")
    if rank.kv_peak is None:
        gaps.null(f"{path}.peak_kv_fraction", "no step of the window has a block count")
    return RankUse(
        instance=rank.instance,
        rank=rank.rank,
        steps=rank.steps,
        new_prefill_tokens_per_second=rank.prefill_tokens / seconds,
        cached_prefill_tokens_per_second=rank.cached_tokens / seconds,
        decode_rows_per_second=rank.decode_rows / seconds,
        mean_decode_rows=rank.decode_rows / rank.steps if rank.steps else None,
        peak_kv_fraction=None if rank.kv_peak is None else rank.kv_peak / facts.kv_blocks,
        active_fraction=rank.seconds / seconds,
    )
