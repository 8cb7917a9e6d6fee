"""From records to a Report: pure functions, numpy, no clock.

Counting rules. A prompt token is counted by the rank that computed or found it, at the end of
that step; an output token when it arrived, for the instance that generated it (the first token
for the prefill instance, the others for the decode instance). So nothing is counted once per
rank, and prefill, cache hits and output are never added up.
"""

from collections.abc import Sequence

import numpy as np

from moe_runtime.report import deployment, latency
from moe_runtime.report.facts import Denominators, DeploymentFacts, Gaps, RunFacts
from moe_runtime.report.latency import Span
from moe_runtime.report.records import RankSteps, RequestRecord, concat
from moe_runtime.report.schema import SCHEMA_VERSION, Deployment, Report, System


def build_report(facts: RunFacts, requests: Sequence[RequestRecord], steps: Sequence[RankSteps]) -> Report:
    """The report of a run. `steps` may hold several batches per rank, in order.

    Raises ValueError if there is nothing to report, or records name deployments the facts do not have.
    """
    ranks = _by_rank(facts, steps)
    gaps = Gaps()
    for note in facts.notes:
        gaps.warn(note)
    ends = np.concatenate([r.end for r in ranks]) if ranks else np.zeros(0)
    span, window = latency.choose_window(facts, requests, ends, gaps)
    in_window = [r.select(span.contains(r.end)) for r in ranks]
    arrived = [r for r in requests if span.has(r.scheduled_arrival)]
    sections, system = _sections(facts, requests, in_window, span, gaps)
    _compare_prompt_counts(requests, ranks, gaps)
    _null_facts(facts, gaps)
    return Report(
        schema_version=SCHEMA_VERSION,
        kind="bench",
        created=facts.created,
        version=facts.version,
        commit=facts.commit,
        machine=facts.machine,
        plan_digest=facts.plan_digest,
        plan=facts.plan,
        model=facts.model,
        options=facts.options,
        window=window,
        requests=latency.count_requests(requests, arrived, _preemptions(facts, ranks, gaps), gaps),
        latency=latency.latencies(arrived, gaps),
        request_rates=latency.request_rates(arrived, gaps),
        goodput=latency.goodput(arrived, facts.slo, span, gaps),
        whole_run=latency.whole_run(requests, gaps),
        system=system,
        deployments=sections,
        warnings=tuple(gaps.warnings),
        missing=tuple(gaps.missing),
        request_log=latency.request_log(requests),
    )


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


def _sections(
    facts: RunFacts, requests: Sequence[RequestRecord], ranks: Sequence[RankSteps], span: Span, gaps: Gaps
) -> tuple[tuple[Deployment, ...], System]:
    nodes_of_all = facts.ranks / facts.ranks_per_node
    output = _output_tokens(requests, span)
    sections = []
    for planned in facts.deployments:
        own = [r for r in ranks if r.instance in planned.instances]
        over = Denominators(
            seconds=span.seconds,
            ranks=planned.ranks,
            nodes_of_role=planned.ranks / facts.ranks_per_node,
            nodes_of_all=nodes_of_all,
        )
        counted = deployment.totals(own, sum(output.get(name, 0) for name in planned.instances))
        sections.append(deployment.describe(planned, own, counted, over, facts.moe_layers, gaps))
    known = {name for d in facts.deployments for name in d.instances}
    lost = sum(count for name, count in output.items() if name not in known)
    if lost:
        gaps.warn(f"{lost} output tokens came from no known instance: they count for the system only")
    over_all = Denominators(span.seconds, facts.ranks, nodes_of_all, nodes_of_all)
    everything = deployment.totals(ranks, sum(output.values())).throughput(over_all)
    return tuple(sections), System(nodes=nodes_of_all, ranks=facts.ranks, throughput=everything)


def _output_tokens(requests: Sequence[RequestRecord], span: Span) -> dict[str, int]:
    """Output tokens that arrived in the window, by the instance that generated them ("" if unknown)."""
    counts: dict[str, int] = {}
    for record in requests:
        inside = span.contains(np.asarray(record.token_times, dtype=np.float64))
        if not len(inside):
            continue
        first, rest = record.prefill_instance or "", record.decode_instance or ""
        counts[first] = counts.get(first, 0) + int(inside[0])
        counts[rest] = counts.get(rest, 0) + int(inside[1:].sum())
    return counts


def _preemptions(facts: RunFacts, ranks: Sequence[RankSteps], gaps: Gaps) -> int:
    total = sum(int(r.preemptions.sum()) for r in ranks)
    if total:
        where = [d.name for d in facts.deployments if _preempted_in(d, ranks)]
        gaps.warn(f"{total} preemptions in {' and '.join(where)}: KV blocks ran out; raise kv_cache.blocks")
    return total


def _preempted_in(planned: DeploymentFacts, ranks: Sequence[RankSteps]) -> bool:
    return any(r.preemptions.any() for r in ranks if r.instance in planned.instances)


def _compare_prompt_counts(requests: Sequence[RequestRecord], ranks: Sequence[RankSteps], gaps: Gaps) -> None:
    """Two independent counts of the prompt tokens of a run without failures must agree."""
    if not ranks or not all(latency.finished(r) for r in requests):
        return
    start = latency.first_arrival(requests)
    during = [r.select(r.end >= start) for r in ranks]
    new = sum(int(r.prefill_tokens.sum()) for r in during)
    cached = sum(int(r.cached_tokens.sum()) for r in during)
    asked = sum(r.prompt_tokens for r in requests)
    if new + cached != asked:
        gaps.warn(
            f"The requests have {asked} prompt tokens, the ranks counted {new} computed and {cached} cached:"
            " the prefill rates are in doubt"
        )


def _null_facts(facts: RunFacts, gaps: Gaps) -> None:
    """Reasons for the facts that are unknown."""
    if facts.commit is None:
        gaps.null("commit", "the package does not run from a git checkout")
    if facts.options.limit is None:
        gaps.null("options.limit", "no limit was asked for: the whole trace was replayed")
    for name in ("cpu_model", "cores", "memory_bytes"):
        if getattr(facts.machine, name) is None:
            gaps.null(f"machine.{name}", "the operating system does not say")
