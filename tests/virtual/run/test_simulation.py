"""Whole simulations of a small plan: figures that must agree with each other, events that must show."""

import dataclasses

import msgspec
import pytest

from moe_runtime.errors import InputError
from moe_runtime.report.build import build_report, report_on
from moe_runtime.report.facts import DeploymentFacts, RunFacts
from moe_runtime.report.records import RequestRecord
from moe_runtime.virtual.cluster.events import Slowdown
from moe_runtime.virtual.cluster.simulate import simulate
from moe_runtime.virtual.cluster.times import ModelTimes
from moe_runtime.virtual.run.loads import LoadChoice
from moe_runtime.virtual.run.prepare import Workload, assumptions, prepare
from moe_runtime.virtual.run.script import FailureAt
from moe_runtime.virtual.run.simulation import kv_seconds, run_simulation
from tests.virtual.run.alike import differences
from tests.virtual.run.scenario import Scenario, make_facts
from tests.virtual.run.small import MODEL, make_plan, placements, requests

SKEWED = LoadChoice("power", 0.8)


def facts_of(plan) -> RunFacts:
    return dataclasses.replace(
        make_facts(simulated=True),
        ranks_per_node=plan.cluster.ranks_per_node,
        moe_layers=MODEL.moe_layers,
        deployments=tuple(
            DeploymentFacts(
                name=d.name,
                instances=tuple(i.name for i in plan.instances if i.deployment == d.name),
                expert_parallel=d.expert_parallel,
                redundant_experts=d.redundant_experts,
                dispatch_backend=d.dispatch.backend,
                kv_blocks=d.kv_cache.blocks,
                kernels={},
            )
            for d in plan.deployments
        ),
        slo=(plan.slo.ttft_ms, plan.slo.tpot_ms),
    )


def simulated(plan, arrivals, scripted=(), choice=SKEWED, change=lambda prepared: prepared):
    prepared = prepare(plan, MODEL, placements(plan), Workload(250.0, 45.0), choice)
    prepared = {name: change(p) for name, p in prepared.items()}
    heard: list[None] = []
    done = run_simulation(
        plan, MODEL, prepared, arrivals, scripted=scripted, on_request=lambda: heard.append(None)
    )
    assert len(heard) == len(arrivals)
    report = report_on(facts_of(plan), done.evidence)
    assert done.end >= arrivals[-1].at
    msgspec.json.encode(report)  # numbers of Python, not of numpy
    return report


def of(report, name):
    return next(d for d in report.deployments if d.name == name)


def bound(report, name, what):
    """Seconds of a deployment's wall time."""
    return next(t.seconds for t in of(report, name).attribution.total.bounds if t.name == what)


def test_figures_agree_with_each_other(tmp_path):
    arrivals = requests()
    report = simulated(make_plan(tmp_path), arrivals)
    prefill, decode = of(report, "prefill"), of(report, "decode")
    assert (report.requests.finished, report.requests.failed) == (len(arrivals), 0)
    assert report.whole_run.output_tokens == sum(r.output_length for r in arrivals)
    assert report.whole_run.prompt_tokens == sum(r.input_length for r in arrivals)
    assert report.whole_run.cached_tokens > 0, "prompts that share a block"
    assert not [w for w in report.warnings if "in doubt" in w], "prompt tokens counted two ways"
    # Without preemptions every decode row is an output token.
    rows = sum(r.decode_rows_per_second for r in decode.per_rank) * report.window.seconds
    assert decode.throughput.output.total * report.window.seconds == pytest.approx(rows, abs=2)
    assert report.latency.itl_ms.count == sum(r.output_length - 1 for r in arrivals)
    assert 0 < prefill.attribution.total.roofline < 1
    assert all(r.active_fraction <= 1 for d in report.deployments for r in d.per_rank)
    assert len(decode.timeline.batch) == len(prefill.timeline.queue) == 200
    whole = decode.timeline.bucket_seconds * 200
    total = sum(decode.timeline.decode_rows_per_second) * decode.timeline.bucket_seconds
    assert total == pytest.approx(sum(r.output_length - 1 for r in arrivals))
    assert whole == pytest.approx(max(r.last_token for r in report.request_log))


class Recorder:
    """Listens to a cluster, and keeps what ranks and clients of a real run would have recorded."""

    def __init__(self) -> None:
        self.told = Scenario(layers=MODEL.num_moe_layers, block=16)
        self._step_ends: dict[str, list[float]] = {}

    def steps(self, run) -> None:
        self.told.record(run)
        each = run.seconds / run.steps
        ends = self._step_ends.setdefault(run.instance, [])
        ends += [run.start + each * (i + 1) for i in range(run.steps)]

    def request(self, end) -> None:
        self.told.ends.append(end)

    def records(self):
        """A token at the end of every step of its decode instance between its second and its last."""
        found = []
        for end in sorted(self.told.ends, key=lambda e: e.index):
            times = [t for t in (end.first_token, end.second_token) if t is not None]
            if end.output_tokens > 2:
                second, last = times[1], end.last_token or 0.0
                ends = self._step_ends[end.decode_instance or ""]
                times += [t for t in ends if second + 1e-9 < t <= last + 1e-9]
            assert len(times) == end.output_tokens, "a token a step, no step without"
            told = {f.name: getattr(end, f.name) for f in dataclasses.fields(end) if "token" not in f.name}
            del told["arrival"]
            found.append(
                RequestRecord(
                    **told,
                    scheduled_arrival=end.arrival,
                    sent=end.arrival,
                    token_times=times,
                    prompt_tokens=end.prompt_tokens,
                    cached_tokens=end.cached_tokens,
                    output_tokens=end.output_tokens,
                )
            )
        return found


def test_a_report_of_the_cluster_is_that_of_its_ranks_and_clients(tmp_path):
    """The cluster told twice: to the collector, and as rows per rank, step and token."""
    plan, arrivals, recorder = make_plan(tmp_path), requests(120, together=4), Recorder()
    prepared = prepare(plan, MODEL, placements(plan), Workload(250.0, 45.0), SKEWED)
    simulate(
        plan,
        MODEL,
        arrivals,
        times={name: ModelTimes(p.cost) for name, p in prepared.items()},
        kv_seconds=kv_seconds(plan, prepared),
        listener=recorder,
    )
    facts = dataclasses.replace(facts_of(plan), simulation=None)
    measured = build_report(facts, recorder.records(), recorder.told.steps())
    assert differences(simulated(plan, arrivals), measured) == {}


def test_the_same_twice_is_the_same(tmp_path):
    plan = make_plan(tmp_path)
    assert simulated(plan, requests(20)) == simulated(plan, requests(20))


def test_loads_are_the_ones_asked_for(tmp_path):
    plan = make_plan(tmp_path)
    even, uneven = (simulated(plan, requests(30), choice=c) for c in (LoadChoice("uniform"), SKEWED))
    for one, other in zip(of(even, "decode").balancedness, of(uneven, "decode").balancedness, strict=True):
        assert one.of_sum > other.of_sum


def test_a_slow_rank_is_waited_for(tmp_path):
    plan = make_plan(tmp_path)
    slow = [Slowdown(instance="decode-0", rank=1, start=0.0, end=1e6, factor=3.0)]
    plain, waited = simulated(plan, requests(30)), simulated(plan, requests(30), slow)
    assert bound(waited, "decode", "imbalance") > bound(plain, "decode", "imbalance")
    assert waited.latency.tpot_ms.mean > 1.5 * plain.latency.tpot_ms.mean


def test_a_failed_instance_fails_what_it_held(tmp_path):
    report = simulated(make_plan(tmp_path), requests(30), [FailureAt(instance="decode-0", at=0.5)])
    assert report.requests.failed > 0
    assert report.requests.finished + report.requests.failed == 30
    assert any("requests failed" in w for w in report.warnings)


def test_assumptions_are_said_and_unknown_machines_refused(tmp_path):
    notes = assumptions(SKEWED, MODEL, "bfloat16")
    assert any("power:0.8 is assumed" in n for n in notes)
    plan = make_plan(tmp_path, "cluster.device=cpu", "cluster.hardware=cpu-host")
    with pytest.raises(InputError, match=r"cluster\.hardware is 'cpu-host'"):
        prepare(plan, MODEL, placements(plan), Workload(250.0, 45.0), SKEWED)
    wide = make_plan(tmp_path, "model.dtype=float32")
    with pytest.raises(InputError, match="h100-sxm has no rate for float32"):
        prepare(wide, MODEL, placements(wide), Workload(250.0, 45.0), SKEWED)
