"""One deployment's part of the report, from the steps of its ranks and its requests' tokens.

Pure. `ranks` are the RankSteps of the deployment, cut to the window by the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.report import balance
from moe_runtime.report.facts import Denominators, DeploymentFacts, Gaps
from moe_runtime.report.records import I64, NOT_MEASURED, OVERLAP_REASONS, PHASES, RankSteps
from moe_runtime.report.schema import (
    Deployment,
    Exchange,
    KvUse,
    LayerBalance,
    OverlapUse,
    PhaseTime,
    RankUse,
    Throughput,
)
from moe_runtime.spec.limits import DISPATCH_MODES

# Phases are exclusive, so they add up to the step; clocks are read at slightly different moments.
_PHASE_TOLERANCE = 0.02


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


def totals(ranks: Sequence[RankSteps], output_tokens: int) -> Totals:
    return Totals(
        new_prefill=sum(int(r.prefill_tokens.sum()) for r in ranks),
        cached_prefill=sum(int(r.cached_tokens.sum()) for r in ranks),
        output=output_tokens,
    )


def describe(
    facts: DeploymentFacts,
    ranks: Sequence[RankSteps],
    counted: Totals,
    over: Denominators,
    moe_layers: Sequence[int],
    gaps: Gaps,
) -> Deployment:
    """The deployment's section. Fields that could not be computed are null with a reason in `gaps`."""
    path = f"deployments.{facts.name}"
    instances = _complete_instances(facts, ranks, gaps)
    walls = np.concatenate([r.wall for r in ranks]) if ranks else np.zeros(0)
    fills = [balance.step_fill(balance.join(i)) for i in instances]
    fill = np.concatenate(fills) if fills else np.zeros(0)
    no_steps = "no step of this deployment ended in the window"
    return Deployment(
        name=facts.name,
        nodes=over.nodes_of_role,
        ranks=facts.ranks,
        expert_parallel=facts.expert_parallel,
        instances=facts.instances,
        redundant_experts=facts.redundant_experts,
        dispatch_backend=facts.dispatch_backend,
        dispatch_modes=_named(_of_instances(ranks, "dispatch_mode"), DISPATCH_MODES),
        kernels=dict(facts.kernels),
        throughput=counted.throughput(over),
        steps=_count_steps(facts, ranks),
        mean_step_ms=gaps.given(
            float(walls.mean() * 1e3) if len(walls) else None, f"{path}.mean_step_ms", no_steps
        ),
        step_fill=gaps.given(float(fill.mean()) if len(fill) else None, f"{path}.step_fill", no_steps),
        recomputed_tokens=sum(int(r.recomputed_tokens.sum()) for r in ranks),
        preemptions=sum(int(r.preemptions.sum()) for r in ranks),
        kv=_kv_use(facts, ranks, f"{path}.kv", gaps),
        balancedness=_balancedness(instances, moe_layers, path, gaps),
        exchange=_exchange(facts, ranks, f"{path}.exchange", gaps),
        phases=_phases(facts, ranks, gaps),
        hidden=_hidden(facts, ranks, f"{path}.hidden", gaps),
        overlap=_overlap(ranks, f"{path}.overlap", gaps),
        per_rank=tuple(_rank_use(facts, r, over.seconds, path, i, gaps) for i, r in enumerate(ranks)),
    )


def _complete_instances(
    facts: DeploymentFacts, ranks: Sequence[RankSteps], gaps: Gaps
) -> list[list[RankSteps]]:
    """The instances all of whose ranks reported; the others get a warning."""
    complete = []
    for name in facts.instances:
        own = sorted((r for r in ranks if r.instance == name), key=lambda r: r.rank)
        if [r.rank for r in own] == list(range(facts.expert_parallel)):
            complete.append(own)
        else:
            found = ", ".join(str(r.rank) for r in own) or "none"
            gaps.warn(
                f"{name}: {facts.expert_parallel} ranks were planned, records came from {found}:"
                " balancedness and step fill leave this instance out"
            )
    return complete


def _count_steps(facts: DeploymentFacts, ranks: Sequence[RankSteps]) -> int:
    """Steps of all instances together; a step that several ranks logged is one step."""
    total = 0
    for name in facts.instances:
        numbers = [r.step for r in ranks if r.instance == name]
        total += len(np.unique(np.concatenate(numbers))) if numbers else 0
    return total


def _balancedness(
    instances: Sequence[Sequence[RankSteps]], moe_layers: Sequence[int], path: str, gaps: Gaps
) -> tuple[LayerBalance, ...]:
    loads = [balance.loads(balance.join(i)) for i in instances]
    loads = [l_RSM for l_RSM in loads if l_RSM.shape[1]]
    if not loads:
        return ()
    per_step_SM = np.concatenate([balance.per_step_balancedness(l_RSM) for l_RSM in loads])
    rows = []
    for column, layer in enumerate(moe_layers):
        summed = [l_RSM[:, :, column].sum(axis=1) for l_RSM in loads]
        row = balance.layer_balance(layer, per_step_SM[:, column], summed)
        if not row.steps:
            for name in ("mean", "p5", "of_sum"):
                gaps.null(
                    f"{path}.balancedness.{column}.{name}", "no rows of the layer were counted in the window"
                )
        rows.append(row)
    return tuple(rows)


def _kv_use(facts: DeploymentFacts, ranks: Sequence[RankSteps], path: str, gaps: Gaps) -> KvUse:
    used = np.concatenate([r.kv_used_blocks for r in ranks]) if ranks else np.zeros(0, np.int64)
    used = used[used != NOT_MEASURED]
    if not len(used):
        for name in ("peak_fraction", "mean_fraction"):
            gaps.null(f"{path}.{name}", "no step of the window has a block count")
        return KvUse(blocks_per_rank=facts.kv_blocks, peak_fraction=None, mean_fraction=None)
    return KvUse(
        blocks_per_rank=facts.kv_blocks,
        peak_fraction=float(used.max() / facts.kv_blocks),
        mean_fraction=float(used.mean() / facts.kv_blocks),
    )


def _exchange(facts: DeploymentFacts, ranks: Sequence[RankSteps], path: str, gaps: Gaps) -> Exchange:
    rows = sum(int(r.tokens.sum()) for r in ranks)
    values: dict[str, int | float | None] = {}
    for name, column in (
        ("dispatched_rows", "rows_dispatched"),
        ("dispatched_bytes", "bytes_dispatched"),
        ("combined_bytes", "bytes_combined"),
    ):
        parts = [getattr(r, column) for r in ranks]
        measured = bool(parts) and not any((p == NOT_MEASURED).any() for p in parts)
        total = sum(int(p.sum()) for p in parts) if measured else None
        values[name] = total
        values[f"{name}_per_token"] = None if total is None or not rows else total / rows
        if total is None:
            what = name.partition("_")[2]
            reason = f"the {facts.dispatch_backend} backend did not count {what} in every step of the window"
            reason = reason if ranks else "no records of this deployment"
            gaps.null(f"{path}.{name}", reason)
            gaps.null(f"{path}.{name}_per_token", reason)
        elif not rows:
            gaps.null(f"{path}.{name}_per_token", "no tokens were run in the window")
    return Exchange(**values)  # type: ignore[arg-type]


def _phases(facts: DeploymentFacts, ranks: Sequence[RankSteps], gaps: Gaps) -> tuple[PhaseTime, ...]:
    steps = sum(len(r) for r in ranks)
    if not steps:
        return ()
    seconds_P = np.sum([r.phases.sum(axis=0) for r in ranks], axis=0)
    wall = float(np.sum([r.wall.sum() for r in ranks]))
    if abs(float(seconds_P.sum()) - wall) > _PHASE_TOLERANCE * wall:
        gaps.warn(f"{facts.name}: the phases sum to {seconds_P.sum():.3f} s, the steps to {wall:.3f} s")
    return tuple(
        PhaseTime(phase=name, seconds_per_step=float(s) / steps, share=float(s) / wall if wall else 0.0)
        for name, s in zip(PHASES, seconds_P, strict=True)
    )


def _hidden(facts: DeploymentFacts, ranks: Sequence[RankSteps], path: str, gaps: Gaps) -> float | None:
    """1 - transport waited / transport busy."""
    busy = float(np.sum([r.transport_busy.sum() for r in ranks]))
    waited = float(np.sum([r.transport_waited.sum() for r in ranks]))
    if facts.expert_parallel == 1:
        reason = "no transport: the EP degree is 1"
    elif np.isnan(busy) or np.isnan(waited):
        reason = f"the {facts.dispatch_backend} backend did not time its transfers in every step"
    elif busy <= 0:
        reason = "no transfer was under way in the window"
    else:
        return 1.0 - waited / busy
    gaps.null(path, reason)
    return None


def _overlap(ranks: Sequence[RankSteps], path: str, gaps: Gaps) -> OverlapUse:
    split = _of_instances(ranks, "micro_batches") == 2
    fraction = float(split.mean()) if len(split) else None
    return OverlapUse(
        overlapped_fraction=gaps.given(fraction, f"{path}.overlapped_fraction", "no step was recorded"),
        reasons=_named(_of_instances(ranks, "overlap_reason"), OVERLAP_REASONS),
    )


def _of_instances(ranks: Sequence[RankSteps], column: str) -> I64:
    """What was agreed in the steps of each instance: all its ranks have the same, so rank 0 speaks for it."""
    firsts = [getattr(r, column) for r in ranks if r.rank == 0]
    return np.concatenate(firsts) if firsts else np.zeros(0, np.int64)


def _named(indices: I64, names: Sequence[str]) -> dict[str, int]:
    """How often each name occurs, of those that do."""
    counts = np.bincount(indices, minlength=len(names))
    return {name: int(n) for name, n in zip(names, counts, strict=True) if n}


def _rank_use(
    facts: DeploymentFacts, steps: RankSteps, seconds: float, path: str, index: int, gaps: Gaps
) -> RankUse:
    measured = steps.kv_used_blocks[steps.kv_used_blocks != NOT_MEASURED]
    if not len(steps):
        gaps.null(f"{path}.per_rank.{index}.mean_decode_rows", "the rank took no step in the window")
    if not len(measured):
        gaps.null(f"{path}.per_rank.{index}.peak_kv_fraction", "no step of the window has a block count")
    return RankUse(
        instance=steps.instance,
        rank=steps.rank,
        steps=len(steps),
        new_prefill_tokens_per_second=float(steps.prefill_tokens.sum() / seconds),
        cached_prefill_tokens_per_second=float(steps.cached_tokens.sum() / seconds),
        decode_rows_per_second=float(steps.decode_tokens.sum() / seconds),
        mean_decode_rows=float(steps.decode_tokens.mean()) if len(steps) else None,
        peak_kv_fraction=float(measured.max() / facts.kv_blocks) if len(measured) else None,
        active_fraction=float(steps.wall.sum() / seconds),
    )
