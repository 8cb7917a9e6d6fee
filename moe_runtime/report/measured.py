"""Evidence of a measured run: request records, and a row per rank and step.

Pure. R ranks, S steps, M MoE layers. Ranks of an instance run the same steps; a step that ended inside the
window on one rank and outside on another counts for the rank, and not where all ranks are compared.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from moe_runtime.report import balance
from moe_runtime.report.buckets import StepSeries, make_timeline
from moe_runtime.report.facts import DeploymentFacts, Gaps, RunFacts, Span, percentiles
from moe_runtime.report.outcomes import RequestOutcome, outcome
from moe_runtime.report.records import (
    F64,
    I64,
    NOT_MEASURED,
    OVERLAP_REASONS,
    PHASES,
    RankSteps,
    RequestRecord,
    concat,
)
from moe_runtime.report.schema import LayerBalance, Percentiles
from moe_runtime.report.schema_time import RankLoads, Timeline
from moe_runtime.report.tally import DeploymentTally, RankTally, Sent
from moe_runtime.spec.limits import DISPATCH_MODES


class Measured:
    """Evidence (see tally.py) of records. `steps` may hold several batches per rank, in order.

    Raises ValueError if records name instances the facts do not have, or contradict each other.
    """

    def __init__(
        self, facts: RunFacts, requests: Sequence[RequestRecord], steps: Sequence[RankSteps]
    ) -> None:
        self._ranks = _by_rank(facts, steps)
        self._records = requests
        self._moe_layers = facts.moe_layers
        self.outcomes: Sequence[RequestOutcome] = tuple(map(outcome, requests))

    @property
    def last_step_end(self) -> float | None:
        return max((float(r.end.max()) for r in self._ranks if len(r)), default=None)

    def busy(self, span: Span) -> bool:
        tokens = any(span.has(t) for r in self._records for t in r.token_times)
        return tokens or any(span.contains(r.end).any() for r in self._ranks)

    def gaps_ms(self, arrivals: Span) -> Percentiles | None:
        found = [
            np.diff(np.asarray(r.token_times, dtype=np.float64))
            for r, o in zip(self._records, self.outcomes, strict=True)
            if o.finished and arrivals.has(o.scheduled_arrival)
        ]
        return percentiles(np.concatenate(found) * 1e3) if found else None

    def output_tokens(self, span: Span) -> Mapping[str, int]:
        counts: dict[str, int] = {}
        for record in self._records:
            inside = span.contains(np.asarray(record.token_times, dtype=np.float64))
            if not len(inside):
                continue
            first, rest = record.prefill_instance or "", record.decode_instance or ""
            counts[first] = counts.get(first, 0) + int(inside[0])
            counts[rest] = counts.get(rest, 0) + int(inside[1:].sum())
        return counts

    def preemptions(self, facts: DeploymentFacts) -> int:
        return sum(int(r.preemptions.sum()) for r in self._of(facts))

    def prompt_tokens(self, start: float) -> tuple[int, int] | None:
        if not self._ranks:
            return None
        during = [r.select(r.end >= start) for r in self._ranks]
        new = sum(int(r.prefill_tokens.sum()) for r in during)
        return new, sum(int(r.cached_tokens.sum()) for r in during)

    def tally(self, facts: DeploymentFacts, span: Span, gaps: Gaps) -> DeploymentTally:
        ranks = [r.select(span.contains(r.end)) for r in self._of(facts)]
        instances = _complete_instances(facts, ranks, gaps)
        fills = [balance.step_fill(joined) for joined in instances]
        kv = _measured([r.kv_used_blocks for r in ranks])
        busy, waited = (
            float(np.sum([c.sum() for c in columns])) if columns else 0.0
            for columns in ([r.transport_busy for r in ranks], [r.transport_waited for r in ranks])
        )
        return DeploymentTally(
            ranks=tuple(_tally_rank(r) for r in ranks),
            steps=_count_steps(facts, ranks),
            fill_sum=sum(float(f.sum()) for f in fills),
            fill_steps=sum(len(f) for f in fills),
            modes=_named(_of_instances(ranks, "dispatch_mode"), DISPATCH_MODES),
            reasons=_named(_of_instances(ranks, "overlap_reason"), OVERLAP_REASONS),
            overlapped=int((_of_instances(ranks, "micro_batches") == 2).sum()),
            kv_mean=float(kv.mean()) if len(kv) else None,
            sent=_sent(facts, ranks),
            phases={p: sum(float(r.phases[:, i].sum()) for r in ranks) for i, p in enumerate(PHASES)},
            transport_busy=None if np.isnan(busy) else busy,
            transport_waited=None if np.isnan(waited) else waited,
            balancedness=_balancedness(instances, self._moe_layers, f"deployments.{facts.name}", gaps),
            attribution=None,
            rank_loads=_rank_loads(instances, f"deployments.{facts.name}.rank_loads", gaps),
            balancing=None,
        )

    def timeline(self, facts: DeploymentFacts, whole: Span) -> Timeline | None:
        instances = _complete_instances(facts, self._of(facts), Gaps())
        series = [_series(i, facts.kv_blocks) for i in instances]
        return make_timeline(facts.name, series, self.outcomes, whole)

    def _of(self, facts: DeploymentFacts) -> list[RankSteps]:
        return [r for r in self._ranks if r.instance in facts.instances]


def _by_rank(facts: RunFacts, steps: Sequence[RankSteps]) -> list[RankSteps]:
    """One RankSteps per rank, in the order of the plan."""
    order = {name: (i, j) for i, d in enumerate(facts.deployments) for j, name in enumerate(d.instances)}
    batches: dict[tuple[str, int], list[RankSteps]] = {}
    for batch in steps:
        if batch.instance not in order:
            raise ValueError(f"records of instance {batch.instance}, which the plan does not have")
        batches.setdefault((batch.instance, batch.rank), []).append(batch)
    keys = sorted(batches, key=lambda k: (order[k[0]], k[1]))
    ranks = [concat(batches[k]) for k in keys]
    for rank in ranks:
        numbers, times = np.unique(rank.step, return_counts=True)
        if (times > 1).any():
            raise ValueError(f"{rank.instance} rank {rank.rank} logged step {numbers[times > 1][0]} twice")
        if rank.num_moe_layers != len(facts.moe_layers):
            raise ValueError(
                f"{rank.instance} rank {rank.rank} logged {rank.num_moe_layers} MoE layers,"
                f" the model has {len(facts.moe_layers)}"
            )
    return ranks


def _tally_rank(steps: RankSteps) -> RankTally:
    kv = _measured([steps.kv_used_blocks])
    return RankTally(
        instance=steps.instance,
        rank=steps.rank,
        steps=len(steps),
        seconds=float(steps.wall.sum()),
        decode_rows=int(steps.decode_tokens.sum()),
        prefill_tokens=int(steps.prefill_tokens.sum()),
        cached_tokens=int(steps.cached_tokens.sum()),
        recomputed_tokens=int(steps.recomputed_tokens.sum()),
        preemptions=int(steps.preemptions.sum()),
        kv_peak=int(kv.max()) if len(kv) else None,
    )


def _measured(columns: Sequence[I64]) -> I64:
    """All values that are known."""
    values: I64 = np.concatenate(columns) if columns else np.zeros(0, np.int64)
    known: I64 = values[values != NOT_MEASURED]
    return known


def _complete_instances(
    facts: DeploymentFacts, ranks: Sequence[RankSteps], gaps: Gaps
) -> list[list[RankSteps]]:
    """Steps that all ranks of an instance have; instances some of whose ranks are silent get a warning."""
    complete = []
    for name in facts.instances:
        own = sorted((r for r in ranks if r.instance == name), key=lambda r: r.rank)
        if [r.rank for r in own] == list(range(facts.expert_parallel)):
            complete.append(balance.join(own))
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


def _of_instances(ranks: Sequence[RankSteps], column: str) -> I64:
    """What was agreed in the steps of each instance: all its ranks have the same, so rank 0 speaks for it."""
    firsts = [getattr(r, column) for r in ranks if r.rank == 0]
    return np.concatenate(firsts) if firsts else np.zeros(0, np.int64)


def _named(indices: I64, names: Sequence[str]) -> dict[str, int]:
    """How often each name occurs, of those that do."""
    counts = np.bincount(indices, minlength=len(names))
    return {name: int(n) for name, n in zip(names, counts, strict=True) if n}


def _sent(facts: DeploymentFacts, ranks: Sequence[RankSteps]) -> Sent:
    def total(column: str) -> int | None:
        parts = [getattr(r, column) for r in ranks]
        counted = bool(parts) and not any((p == NOT_MEASURED).any() for p in parts)
        return sum(int(p.sum()) for p in parts) if counted else None

    uncounted = f"the {facts.dispatch_backend} backend did not count {{what}} in every step of the window"
    return Sent(
        dispatched_rows=total("rows_dispatched"),
        dispatched_bytes=total("bytes_dispatched"),
        combined_bytes=total("bytes_combined"),
        why=uncounted if ranks else "no records of this deployment",
    )


def _balancedness(
    instances: Sequence[Sequence[RankSteps]], moe_layers: Sequence[int], path: str, gaps: Gaps
) -> tuple[LayerBalance, ...]:
    loads = [balance.loads(joined) for joined in instances]
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


def _rank_loads(instances: Sequence[Sequence[RankSteps]], path: str, gaps: Gaps) -> RankLoads | None:
    """Of the first instance whose ranks all counted rows, by the placement they ran with."""
    for joined in instances:
        load_RSM = balance.loads(joined)
        if not load_RSM.any():
            continue
        epoch_S = joined[0].placement_epoch[load_RSM.any(axis=(0, 2))]
        oldest, newest = int(epoch_S.min()), int(epoch_S.max())
        before, after = (
            balance.over_mean(load_RSM[:, joined[0].placement_epoch == epoch].sum(axis=1).T)
            for epoch in (oldest, newest)
        )
        if oldest == newest:
            gaps.null(f"{path}.before", "experts did not move in the window")
        return RankLoads(
            instance=joined[0].instance, before=None if oldest == newest else before, after=after
        )
    return None


def _series(joined: Sequence[RankSteps], kv_blocks: int) -> StepSeries:
    """One instance's steps, ranks joined."""

    def added(column: str) -> F64:
        return np.asarray(np.sum([getattr(r, column) for r in joined], axis=0, dtype=np.float64))

    kv_RS = np.stack([r.kv_used_blocks for r in joined])
    load_SM = balance.per_step_balancedness(balance.loads(joined))
    known = ~np.isnan(load_SM)
    balancedness = np.full(len(load_SM), np.nan)
    layers = known.sum(axis=1)
    np.divide(np.where(known, load_SM, 0.0).sum(axis=1), layers, out=balancedness, where=layers > 0)
    start = np.min([r.start for r in joined], axis=0)
    return StepSeries(
        ranks=len(joined),
        start=start,
        seconds=np.max([r.end for r in joined], axis=0) - start,
        steps=np.ones(len(start)),
        prefill=added("prefill_tokens"),
        decode=added("decode_tokens"),
        kv=np.where((kv_RS == NOT_MEASURED).any(axis=0), np.nan, kv_RS.mean(axis=0) / kv_blocks),
        balancedness=balancedness,
        fill=balance.step_fills(joined),
    )
