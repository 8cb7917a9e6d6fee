"""A simulated run and a measured one of the same steps have the same figures."""

import dataclasses

import numpy as np
import pytest

from moe_runtime.report.build import build_report, report_on
from moe_runtime.report.html.page import render_page
from moe_runtime.virtual.cost.balance import Drift
from moe_runtime.virtual.cost.loads import place, power_law
from moe_runtime.virtual.run.collect import Collector
from moe_runtime.virtual.run.evidence import Simulated
from moe_runtime.virtual.run.history import LoadHistory
from moe_runtime.virtual.run.loads import Assumed, DeploymentLoads
from tests.virtual.run.alike import differences
from tests.virtual.run.scenario import BLOCK, LAYERS, RANKS, Scenario, make_facts, make_scenario


def make_loads(ranks: int) -> DeploymentLoads:
    load_LE = power_law(len(LAYERS), 32, 0.5)
    return DeploymentLoads(
        Assumed(
            load_LE=load_LE,
            placement=place(load_LE, ranks=ranks, ranks_per_node=2, redundant_experts=2, balanced=True),
            redundant_experts=2,
            moe_layers=LAYERS,
            top_k=4,
            ranks_per_node=2,
            drift=Drift(common=0.1, sequence=1.0),
            tokens_per_sequence=1.0,
        )
    )


def simulated(scenario):
    facts = make_facts(simulated=True)
    collector = Collector(
        RANKS,
        last_arrival=max(r.scheduled_arrival for r in scenario.records),
        block_tokens=dict.fromkeys(RANKS, BLOCK),
    )
    for run in scenario.runs:
        collector.steps(run)
    for end in scenario.ends:
        collector.request(end)
    loads = {
        d.name: LoadHistory(dict.fromkeys(d.instances, make_loads(d.expert_parallel)))
        for d in facts.deployments
    }
    return report_on(facts, Simulated(collector, loads))


def measured(scenario):
    return build_report(make_facts(simulated=False), scenario.records, scenario.steps())


@pytest.mark.parametrize("seed", range(3))
def test_all_figures_are_those_of_a_measured_run(seed):
    scenario = make_scenario(seed=seed)
    assert max(r.steps for r in scenario.runs) > 4, "runs of steps are what is tested"
    assert differences(simulated(scenario), measured(scenario)) == {}


def test_a_closed_batch_is_reported_over_the_whole_run():
    """All arrive at once: no window of arrivals, so drain and all."""
    scenario = make_scenario(requests=12, seconds=0.5)
    assert simulated(scenario).window.basis == "whole_run"
    assert differences(simulated(scenario), measured(scenario)) == {}


def test_gaps_between_tokens_are_exact_within_runs_of_steps():
    """Two requests of one run; one gets its second token in the middle of it."""
    s = Scenario()
    s.tell("prefill-0", 0, 1, 0.0, 0.5, prefill=[20, 0])
    s.tell("decode-0", 0, 4, 0.5, 0.1, decode=[1, 0, 0, 0])
    s.tell("decode-0", 4, 2, 0.9, 0.2, decode=[1, 1, 0, 0])
    s.end(0, 0.0, [0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.3], prompt=10)
    s.end(1, 0.0, [0.5, 1.1, 1.3], prompt=10)
    table = simulated(s).latency.itl_ms
    gaps = np.diff([0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.3]).tolist() + [0.6, 0.2]
    assert (table.count, table.mean) == (8, pytest.approx(np.mean(gaps) * 1e3))
    assert table.p50 == pytest.approx(np.percentile(gaps, 50) * 1e3)
    assert table.p99 == pytest.approx(np.percentile(gaps, 99) * 1e3)


def test_wall_time_is_told_twice_and_adds_up():
    report = simulated(make_scenario())
    for deployment in report.deployments:
        attribution = deployment.attribution
        assert [u.instance for u in attribution.instances] == list(deployment.instances)
        assert attribution.total.seconds == pytest.approx(report.window.seconds * len(attribution.instances))
        for use in (attribution.total, *attribution.instances):
            for table in (use.parts, use.bounds):
                assert sum(t.seconds for t in table) == pytest.approx(use.seconds)
                assert sum(t.share for t in table) == pytest.approx(1)
            assert use.roofline == pytest.approx(0.5)
        idle = attribution.total.parts[-1]
        active = np.mean([r.active_fraction for r in deployment.per_rank])
        assert (idle.name, idle.share) == ("idle", pytest.approx(1 - active))


def test_balancedness_is_drawn_and_loads_are_shown_before_and_after():
    report = simulated(make_scenario())
    for deployment in report.deployments:
        assert [b.layer for b in deployment.balancedness] == list(LAYERS)
        for layer in deployment.balancedness:
            assert 0 < layer.p5 <= layer.mean <= layer.of_sum <= 1
            assert layer.steps == deployment.steps
        loads = deployment.rank_loads
        assert np.shape(loads.before) == np.shape(loads.after) == (2, deployment.expert_parallel)
        assert np.mean(loads.after, axis=1) == pytest.approx([1, 1], abs=1e-3)
        assert np.max(loads.after) < np.max(loads.before)
        known = [b for b in deployment.timeline.balancedness if b is not None]
        assert known
        assert all(0 < b <= 1 for b in known)


def test_a_deployment_without_steps_has_no_loads_and_a_page():
    scenario = make_scenario()
    scenario.runs = [r for r in scenario.runs if r.instance == "prefill-0"]
    scenario.ends = [
        dataclasses.replace(e, second_token=None, last_token=e.first_token, output_tokens=1)
        for e in scenario.ends
    ]
    report = simulated(scenario)
    decode = next(d for d in report.deployments if d.name == "decode")
    assert (decode.balancedness, decode.rank_loads) == ((), None)
    assert "deployments.decode.rank_loads" in {m.path for m in report.missing}
    assert "<html" in render_page([("RUN.json", report)], (), None)


def test_every_null_has_a_reason():
    report = simulated(make_scenario())
    paths = {m.path for m in report.missing}
    assert {"deployments.decode.exchange.dispatched_rows", "machine.cores", "simulation.events"} <= paths
    assert not [p for p in paths if "attribution" in p]
    reasons = {m.path: m.reason for m in report.missing}
    assert "does not count their bytes" in reasons["deployments.decode.exchange.combined_bytes"]


def test_a_run_of_steps_across_the_last_arrival_is_cut_there():
    """Ten steps of 0.1 s, the last request arrives after 1.25 s: two steps are in, eight are not."""
    s = Scenario()
    s.tell("prefill-0", 0, 1, 0.0, 1.0, prefill=[20, 0])
    s.tell("decode-0", 0, 10, 1.0, 0.1, decode=[2, 0, 0, 0], kv_used=[9, 0, 0, 0])
    times = [1.0 + 0.1 * k for k in range(11)]
    s.end(0, 0.0, times, prompt=10)
    s.end(1, 0.0, times, prompt=10)
    s.end(2, 1.25, [], prompt=10, error="shed")
    report = simulated(s)
    decode = report.deployments[1]
    assert (report.window.basis, decode.steps) == ("arrivals", 2)
    assert decode.per_rank[0].decode_rows_per_second == pytest.approx(4 / 1.25)
    assert decode.throughput.output.total == pytest.approx(4 / 1.25)
    assert decode.per_rank[0].peak_kv_fraction == pytest.approx(5 / 400)
    assert decode.mean_step_ms == pytest.approx(100)
    assert report.whole_run.output_tokens == 22


def test_a_collector_keeps_no_row_per_step_or_rank():
    s = Scenario()
    run = s.runs
    s.tell("decode-0", 0, 5, 0.0, 0.1, decode=[1, 2, 3, 4])
    collector = Collector(RANKS, last_arrival=1e9, block_tokens=dict.fromkeys(RANKS, BLOCK))
    many = dataclasses.replace(run[0], steps=1_000_000)
    collector.steps(many)
    assert len(collector.runs["decode-0"]) == 1
    assert collector.runs["decode-0"].inside.decode.tolist() == [1e6, 2e6, 3e6, 4e6]
