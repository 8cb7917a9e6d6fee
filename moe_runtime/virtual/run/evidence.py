"""Evidence of a simulated run (see `report.tally`): what was collected, as a measured run would tell it.

Owns how runs of steps and ends of requests become tallies, gaps between tokens, and shares of time. Pure.
N runs of steps of an instance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from moe_runtime.report.buckets import StepSeries, make_timeline
from moe_runtime.report.facts import DeploymentFacts, Gaps, Span, weighted_percentiles
from moe_runtime.report.outcomes import RequestOutcome
from moe_runtime.report.records import F64, OVERLAP_REASONS
from moe_runtime.report.schema import LayerBalance, Percentiles
from moe_runtime.report.schema_time import Attribution, Balancing, Timeline
from moe_runtime.report.tally import DeploymentTally, RankTally, Sent
from moe_runtime.spec.limits import DISPATCH_MODES
from moe_runtime.virtual.cluster.records import I64
from moe_runtime.virtual.run.attribution import TimeSums, attribute
from moe_runtime.virtual.run.collect import Collector, InstanceRuns, RankSums
from moe_runtime.virtual.run.history import LoadHistory

NO_BALANCING = Balancing(decisions=0, waits=0, late_windows=0, rebalances=())
_CLOSE = 1e-9  # relative: times of one moment that were added up differently
_UNCOUNTED = "a simulation times transfers; it does not count their {what}"


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Requests of one decode instance with at least two tokens, arrays [n]."""

    second: F64
    last: F64
    later: I64  # tokens after the second


class Simulated:
    """Evidence of a run that `collector` heard whole. `loads` and `balancing` by deployment."""

    def __init__(
        self,
        collector: Collector,
        loads: Mapping[str, LoadHistory],
        balancing: Mapping[str, Balancing] = MappingProxyType({}),
    ) -> None:
        self._runs, self._loads, self._balancing = collector.runs, loads, balancing
        self.outcomes: Sequence[RequestOutcome] = sorted(collector.outcomes, key=lambda r: r.index)

    @property
    def last_step_end(self) -> float | None:
        return max((float(r.end[-1]) for r in self._runs.values() if len(r)), default=None)

    def busy(self, span: Span) -> bool:
        return any(span.contains(r.end).any() for r in self._runs.values())

    def gaps_ms(self, arrivals: Span) -> Percentiles | None:
        """A request's gaps after its second token are the steps of its decode instance."""
        done = [r for r in self.outcomes if r.finished and arrivals.has(r.scheduled_arrival)]
        firsts = [
            r.second_token - r.first_token for r in done if r.second_token and r.first_token is not None
        ]
        values, counts = [np.array(firsts, np.float64)], [np.ones(len(firsts), np.int64)]
        for name, tokens in _by_instance(done).items():
            runs = self._runs[name]
            start, each = runs.column("start"), runs.column("seconds") / runs.column("steps")
            since_last = start + each - np.concatenate([start[:1], runs.end[:-1]])
            for gaps, over in zip((since_last, each), _passes(runs, tokens), strict=True):
                values.append(gaps)
                counts.append(over)
        return weighted_percentiles(np.concatenate(values) * 1e3, np.concatenate(counts))

    def output_tokens(self, span: Span) -> Mapping[str, int]:
        """Of requests under way when the span ends, tokens are as many as their part of the steps."""
        counts: dict[str, int] = {}
        for r in self.outcomes:
            if r.first_token is not None and span.has(r.first_token):
                name = r.prefill_instance or ""
                counts[name] = counts.get(name, 0) + 1
        for name, tokens in _by_instance(self.outcomes).items():
            by_second, by_last, by_end = (
                _steps_by(self._runs[name], times)
                for times in (tokens.second, tokens.last, np.minimum(tokens.last, span.end))
            )
            share = (by_end - by_second) / np.maximum(by_last - by_second, 1.0)
            share = np.where(tokens.last <= span.end, 1.0, np.clip(share, 0.0, 1.0))
            seen = np.where(tokens.second <= span.end, 1 + np.floor(tokens.later * share + _CLOSE), 0)
            counts[name] = counts.get(name, 0) + int(seen.sum())
        return counts

    def preemptions(self, facts: DeploymentFacts) -> int:
        return sum(int(self._runs[n].column("preemptions").sum()) for n in facts.instances)

    def prompt_tokens(self, start: float) -> tuple[int, int] | None:
        runs = [r for r in self._runs.values() if len(r)]
        if not runs:
            return None
        new, cached = (sum(int(r.column(name).sum()) for r in runs) for name in ("prefill", "cached"))
        return new, cached

    def tally(self, facts: DeploymentFacts, span: Span, gaps: Gaps) -> DeploymentTally:
        windows = [_Window(name, self._runs[name], span) for name in facts.instances]
        path = f"deployments.{facts.name}"
        fill = np.concatenate([w.of("fill") for w in windows])
        steps = np.concatenate([w.of("steps") for w in windows])
        has_fill = ~np.isnan(fill)
        micro = np.concatenate([w.of("micro_batches") for w in windows])
        reason = np.concatenate([w.of("reason") for w in windows])
        mode = np.concatenate([w.of("mode") for w in windows])
        rank_steps = sum(w.steps * w.ranks for w in windows)
        kv = sum(float((w.of("kv") * w.of("steps")).sum()) for w in windows)
        transport = [
            sum(w.ranks * float(w.of(name).sum()) for w in windows) for name in ("communication", "exposed")
        ]
        layers, balancing = self._layers(facts, windows), self._balancing.get(facts.name, NO_BALANCING)
        if balancing.late_windows > balancing.decisions:
            gaps.warn(
                f"{facts.name}: {balancing.late_windows} windows ended while the solver was at work, for"
                f" {balancing.decisions} decisions: balancing.interval_tokens is short"
            )
        return DeploymentTally(
            ranks=tuple(t for w in windows for t in w.rank_tallies()),
            steps=int(steps.sum()),
            fill_sum=float((fill * steps)[has_fill].sum()),
            fill_steps=int(steps[has_fill].sum()),
            modes=_named(mode, steps, DISPATCH_MODES),
            reasons=_named(reason, steps, OVERLAP_REASONS),
            overlapped=int(steps[micro == 2].sum()),
            kv_mean=kv / rank_steps if rank_steps else None,
            sent=Sent(dispatched_rows=None, dispatched_bytes=None, combined_bytes=None, why=_UNCOUNTED),
            phases={},
            transport_busy=transport[0],
            transport_waited=transport[1],
            balancedness=layers,
            attribution=_attribution(windows, span, f"{path}.attribution", gaps),
            rank_loads=self._loads[facts.name].rank_loads(facts.instances[0]) if layers else None,
            balancing=balancing,
        )

    def timeline(self, facts: DeploymentFacts, whole: Span) -> Timeline | None:
        series = [self._series(facts, name) for name in facts.instances]
        return make_timeline(facts.name, series, self.outcomes, whole)

    def _layers(self, facts: DeploymentFacts, windows: Sequence["_Window"]) -> tuple[LayerBalance, ...]:
        """Of micro-batches of the mean size of the steps that have rows."""
        batches = rows = 0.0
        ran: dict[str, tuple[F64, F64]] = {}
        for w in windows:
            busy = ~np.isnan(w.of("fill"))
            ran[w.name] = w.of("start")[busy], w.of("steps")[busy]
            batches += float((w.of("steps") * w.of("micro_batches"))[busy].sum())
            rows += float(w.rows[busy].sum())
        return self._loads[facts.name].layers(ran, rows / batches) if batches else ()

    def _series(self, facts: DeploymentFacts, name: str) -> StepSeries:
        runs = self._runs[name]
        steps, rows = runs.column("steps"), _rows(runs)
        return StepSeries(
            ranks=runs.ranks,
            start=runs.column("start"),
            seconds=runs.column("seconds"),
            steps=steps,
            prefill=runs.column("prefill"),
            decode=runs.column("decode"),
            kv=runs.column("kv") / (runs.ranks * facts.kv_blocks),
            balancedness=self._loads[facts.name].step_balancedness(
                name, runs.column("start"), rows / (steps * runs.column("micro_batches"))
            ),
            fill=runs.column("fill"),
        )


class _Window:
    """One instance's runs of steps that ended in the span."""

    def __init__(self, name: str, runs: InstanceRuns, span: Span) -> None:
        self.name, self.ranks, self._runs = name, runs.ranks, runs
        self._inside = span.contains(runs.end)
        whole = bool(self._inside.all())
        self._sums: RankSums = runs.inside.plus(runs.after) if whole else runs.inside
        self.steps = int(self.of("steps").sum())

    def of(self, column: str) -> F64:
        return self._runs.column(column)[self._inside]

    @property
    def rows(self) -> F64:
        return _rows(self._runs)[self._inside]

    @property
    def sums(self) -> TimeSums:
        return TimeSums.of(self.of)

    def rank_tallies(self) -> list[RankTally]:
        s, seconds = self._sums, float(self.of("seconds").sum())
        columns = zip(s.decode, s.prefill, s.cached, s.recomputed, s.preemptions, s.kv_peak, strict=True)
        return [
            RankTally(
                instance=self.name,
                rank=rank,
                steps=self.steps,
                seconds=seconds,
                decode_rows=int(decode),
                prefill_tokens=int(prefill),
                cached_tokens=int(cached),
                recomputed_tokens=int(recomputed),
                preemptions=int(preemptions),
                kv_peak=int(peak) if self.steps else None,
            )
            for rank, (decode, prefill, cached, recomputed, preemptions, peak) in enumerate(columns)
        ]


def _attribution(windows: Sequence[_Window], span: Span, path: str, gaps: Gaps) -> Attribution:
    uses = [attribute(w.name, w.sums, span.seconds) for w in windows]
    together = sum((w.sums for w in windows[1:]), windows[0].sums)
    total = attribute("all", together, span.seconds * len(windows))
    for use, where in ((total, "total"), *((u, f"instances.{i}") for i, u in enumerate(uses))):
        if use.roofline is None:
            gaps.null(f"{path}.{where}.roofline", "no step of a known roofline ended in the window")
    return Attribution(total=total, instances=tuple(uses))


def _rows(runs: InstanceRuns) -> F64:
    """Rows of all ranks and steps of each run."""
    return runs.column("decode") + runs.column("prefill") + runs.column("recomputed")


def _place(runs: InstanceRuns, times: F64) -> tuple[I64, F64]:
    """Of each time: how many runs have ended by then, and how many steps of the one under way."""
    late = times + _CLOSE * np.maximum(1.0, times)
    ended = np.searchsorted(runs.end, late, side="right")
    now = np.minimum(ended, len(runs) - 1)
    steps = runs.column("steps")[now]
    under_way = np.floor((late - runs.column("start")[now]) / runs.column("seconds")[now] * steps)
    return ended, np.where(ended < len(runs), np.clip(under_way, 0.0, steps), 0.0)


def _steps_by(runs: InstanceRuns, times: F64) -> F64:
    """Steps that have ended by each time."""
    ended, under_way = _place(runs, times)
    before = np.concatenate([[0.0], np.cumsum(runs.column("steps"))])
    return np.asarray(before[ended] + under_way)


def _passes(runs: InstanceRuns, tokens: _Tokens) -> tuple[I64, I64]:
    """int64 [N] each: how often requests got a token after their second at the end of a run's first step, and
    of its other steps; all requests together.
    """

    def until(times: F64) -> tuple[I64, I64]:
        ended, under_way = _place(runs, times)
        steps = runs.column("steps").astype(np.int64)
        whole = np.bincount(ended, minlength=len(runs) + 1)
        later = whole.sum() - np.cumsum(whole)[:-1]  # times at which the run is over
        begun = np.bincount(ended, weights=under_way > 0, minlength=len(runs) + 1)[:-1].astype(np.int64)
        part = np.bincount(ended, weights=under_way, minlength=len(runs) + 1)[:-1].astype(np.int64)
        return later + begun, later * (steps - 1) + part - begun

    (first, other), (first_before, other_before) = until(tokens.last), until(tokens.second)
    return first - first_before, other - other_before


def _by_instance(requests: Sequence[RequestOutcome]) -> dict[str, _Tokens]:
    found: dict[str, list[tuple[float, float, int]]] = {}
    for r in requests:
        if r.second_token is not None and r.last_token is not None and r.decode_instance is not None:
            found.setdefault(r.decode_instance, []).append((r.second_token, r.last_token, r.num_tokens - 2))
    tables = {name: np.array(rows, np.float64) for name, rows in found.items()}
    return {n: _Tokens(t[:, 0], t[:, 1], t[:, 2].astype(np.int64)) for n, t in tables.items()}


def _named(indices: F64, steps: F64, names: Sequence[str]) -> dict[str, int]:
    """Steps by name, of the names that occur."""
    counts = np.bincount(indices.astype(np.int64), weights=steps, minlength=len(names))
    return {name: int(n) for name, n in zip(names, counts, strict=True) if n}
