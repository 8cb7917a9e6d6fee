"""From evidence to a Report: pure functions, numpy, no clock.

Counting rules. A prompt token is counted by the rank that computed or found it, at the end of
that step; an output token when it arrived, for the instance that generated it (the first token
for the prefill instance, the others for the decode instance). So nothing is counted once per
rank, and prefill, cache hits and output are never added up. Measured and simulated runs bring
evidence of the same kind (tally.py), so every figure has one definition.
"""

from collections.abc import Sequence

from moe_runtime.report import deployment, latency
from moe_runtime.report.deployment import Totals
from moe_runtime.report.facts import Denominators, Gaps, RunFacts, Span
from moe_runtime.report.measured import Measured
from moe_runtime.report.records import RankSteps, RequestRecord
from moe_runtime.report.schema import SCHEMA_VERSION, Deployment, Report, System
from moe_runtime.report.tally import Evidence


def build_report(facts: RunFacts, requests: Sequence[RequestRecord], steps: Sequence[RankSteps]) -> Report:
    """The report of a measured run. `steps` may hold several batches per rank, in order.

    Raises MoeRuntimeError if no request was served, ValueError for no requests and for records that name
    deployments the facts do not have.
    """
    return report_on(facts, Measured(facts, requests, steps))


def report_on(facts: RunFacts, evidence: Evidence) -> Report:
    """The report of a run. Raises MoeRuntimeError if no request was served, ValueError if there is none."""
    gaps = Gaps()
    for note in facts.notes:
        gaps.warn(note)
    requests = evidence.outcomes
    span, window = latency.choose_window(facts, evidence, gaps)
    arrived = [r for r in requests if span.has(r.scheduled_arrival)]
    sections, system = _sections(facts, evidence, span, gaps)
    _compare_prompt_counts(evidence, gaps)
    _null_facts(facts, gaps)
    return Report(
        schema_version=SCHEMA_VERSION,
        kind="bench",
        created=facts.created,
        version=facts.version,
        commit=facts.commit,
        simulated=facts.simulation is not None,
        simulation=facts.simulation,
        machine=facts.machine,
        plan_digest=facts.plan_digest,
        plan=facts.plan,
        model=facts.model,
        options=facts.options,
        window=window,
        requests=latency.count_requests(requests, arrived, _preemptions(facts, evidence, gaps), gaps),
        latency=latency.latencies(arrived, evidence.gaps_ms(span), gaps),
        request_rates=latency.request_rates(arrived, gaps),
        goodput=latency.goodput(arrived, facts.slo, span, gaps),
        whole_run=latency.whole_run(requests, gaps),
        system=system,
        deployments=sections,
        warnings=tuple(gaps.warnings),
        missing=tuple(gaps.missing),
        request_log=latency.request_log(requests),
    )


def _sections(
    facts: RunFacts, evidence: Evidence, span: Span, gaps: Gaps
) -> tuple[tuple[Deployment, ...], System]:
    nodes_of_all = facts.ranks / facts.ranks_per_node
    output, whole = evidence.output_tokens(span), latency.whole_span(evidence)
    sections, everything = [], Totals(0, 0, 0)
    for planned in facts.deployments:
        over = Denominators(
            seconds=span.seconds,
            ranks=planned.ranks,
            nodes_of_role=planned.ranks / facts.ranks_per_node,
            nodes_of_all=nodes_of_all,
        )
        tally = evidence.tally(planned, span, gaps)
        counted = deployment.totals(tally, sum(output.get(name, 0) for name in planned.instances))
        everything = everything.plus(counted)
        timeline = evidence.timeline(planned, whole)
        sections.append(deployment.describe(planned, tally, counted, over, timeline, gaps))
    known = {name for d in facts.deployments for name in d.instances}
    lost = sum(count for name, count in output.items() if name not in known)
    if lost:
        gaps.warn(f"{lost} output tokens came from no known instance: they count for the system only")
    everything = everything.plus(Totals(0, 0, lost))
    over_all = Denominators(span.seconds, facts.ranks, nodes_of_all, nodes_of_all)
    return tuple(sections), System(
        nodes=nodes_of_all, ranks=facts.ranks, throughput=everything.throughput(over_all)
    )


def _preemptions(facts: RunFacts, evidence: Evidence, gaps: Gaps) -> int:
    found = {d.name: evidence.preemptions(d) for d in facts.deployments}
    total = sum(found.values())
    if total:
        where = [name for name, count in found.items() if count]
        gaps.warn(f"{total} preemptions in {' and '.join(where)}: KV blocks ran out; raise kv_cache.blocks")
    return total


def _compare_prompt_counts(evidence: Evidence, gaps: Gaps) -> None:
    """Two independent counts of the prompt tokens of a run without failures must agree."""
    requests = evidence.outcomes
    counted = evidence.prompt_tokens(latency.first_arrival(requests))
    if counted is None or not all(r.finished for r in requests):
        return
    new, cached = counted
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
    if facts.simulation is None:
        gaps.null("simulation", "the run was measured")
    elif facts.simulation.events is None:
        gaps.null("simulation.events", "no events were asked for")
    unsaid = "the operating system does not say"
    reason = unsaid if facts.simulation is None else "simulated: no figure depends on the host"
    for name in ("cpu_model", "cores", "memory_bytes"):
        if getattr(facts.machine, name) is None:
            gaps.null(f"machine.{name}", reason)
