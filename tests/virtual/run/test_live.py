"""The balancer decides live inside a simulation: loads change, and it sees and moves what it can."""

from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.engine.balancing.wire import NewPlacement
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.topology import Topology
from moe_runtime.virtual.cluster.clock import Clock
from moe_runtime.virtual.cluster.events import Rebalance
from moe_runtime.virtual.cluster.moving import Moves
from moe_runtime.virtual.cluster.times import StepTimes
from moe_runtime.virtual.cost.balance import Drift
from moe_runtime.virtual.cost.loads import place
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.run import balancer
from moe_runtime.virtual.run.epochs import Epochs
from moe_runtime.virtual.run.loads import DeploymentLoads
from moe_runtime.virtual.run.mover import VirtualMover
from moe_runtime.virtual.run.prepare import Prepared
from moe_runtime.virtual.run.script import FailureAt
from tests.virtual.run.small import MODEL, SKEWED, make_plan, prepared_of, requests, shift
from tests.virtual.run.test_simulation import bound, of, simulated

LIVE = ("deployments.decode.balancing.enabled=true", "deployments.decode.balancing.interval_tokens=800")


def calm(prepared: Prepared) -> Prepared:
    """Loads that do not stray from step to step: what is left is the noise of counting tokens."""
    loads = DeploymentLoads(replace(prepared.assumed, drift=Drift(common=0.0, sequence=0.0)))
    cost = CostModel(prepared.model, prepared.cost.setting, loads.balance)
    return replace(prepared, loads=loads, cost=cost)


def test_the_balancer_follows_the_traffic(tmp_path):
    """The topic changes; nobody tells the balancer, and it moves."""
    arrivals, shifts = requests(72, together=4), [shift(0.5, "topic:1")]
    live = simulated(make_plan(tmp_path, *LIVE), arrivals, shifts, SKEWED, calm)
    still = simulated(make_plan(tmp_path), arrivals, shifts, SKEWED, calm)
    balancing = of(live, "decode").balancing
    moves = [r for r in balancing.rebalances if r.action == "move"]
    assert balancing.decisions == balancing.waits + len(balancing.rebalances)
    for begin, end in ((0.0, 0.5), (0.5, 9.9)):
        one = max((r for r in moves if begin < r.decided < end), key=lambda r: r.balancedness_after)
        assert one.instance == "decode-0"
        assert one.balancedness_after > one.balancedness_before + 0.1
        assert one.balancedness_after == pytest.approx(one.balancedness_predicted, abs=0.1)
        assert " moves in 3 layers: " in one.reason
        assert (one.outcome, one.why) == ("done", "")
        assert 0 < one.seconds < 0.2
        assert one.moved_bytes == one.moves * 3 * MODEL.hidden * MODEL.moe.intermediate * 2
    assert bound(live, "decode", "imbalance") < bound(still, "decode", "imbalance")
    assert live.latency.tpot_ms.mean < still.latency.tpot_ms.mean
    nothing = of(still, "decode").balancing
    assert (nothing.decisions, nothing.rebalances) == (0, ())
    assert of(live, "prefill").balancing.decisions == 0, "it balances apart, or not"
    loads = of(live, "decode").rank_loads
    assert max(map(max, loads.after)) < max(map(max, loads.before))
    assert of(still, "decode").rank_loads.after == of(still, "decode").rank_loads.before


def test_a_byte_a_step_is_too_slow_and_is_dropped(tmp_path):
    plan = make_plan(tmp_path, *LIVE, "deployments.decode.balancing.bytes_per_step=1")
    report = simulated(plan, requests(40, every=0.4), (), SKEWED)
    first = of(report, "decode").balancing.rebalances[0]
    assert (first.outcome, first.why) == ("dropped", "not every rank was staged within 10 s")
    assert first.seconds == pytest.approx(10.0, abs=0.5)
    loads = of(report, "decode").rank_loads
    assert loads.after == loads.before


def test_what_is_asked_for_moves_without_a_balancer_too(tmp_path):
    """As `POST /admin/rebalance`: where nothing was counted yet there is nothing to go by."""
    asked = [Rebalance(instance="decode-0", at=at) for at in (0.0, 1.0)]
    report, again = (simulated(make_plan(tmp_path), requests(25), asked, SKEWED) for _ in range(2))
    assert report == again, "noise is seeded"
    balancing = of(report, "decode").balancing
    assert (balancing.decisions, balancing.waits) == (2, 1)
    assert [(r.action, r.reason) for r in balancing.rebalances] == [("move", "asked for")]
    assert balancing.rebalances[0].decided == pytest.approx(1.0, abs=0.01)


def test_an_instance_that_is_started_anew_begins_where_the_plan_says(tmp_path):
    plan = make_plan(tmp_path, *LIVE, "deployments.decode.balancing.interval_tokens=300")
    failure = FailureAt(instance="decode-0", at=1.0, restart_after=0.5)
    report = simulated(plan, requests(50), [failure], SKEWED)
    firsts = [r for r in of(report, "decode").balancing.rebalances if r.decided < 1.0][:1]
    again = [r for r in of(report, "decode").balancing.rebalances if r.decided > 1.5][:1]
    assert firsts[0].balancedness_before == again[0].balancedness_before
    lost = [r for r in report.request_log if r.error is not None]
    assert lost
    assert all(r.arrival < 1.7 for r in lost), "it serves again after half a second and the reading"
    assert max(r.arrival for r in lost) > 1.4


class Taken:
    """An instance that only takes moves."""

    name = "decode-0"
    moves: Moves | None = None
    times: StepTimes | None = None

    def move(self, moves: Moves) -> None:
        self.moves = moves

    def set_times(self, times: StepTimes) -> None:
        self.times = times


def test_what_a_move_takes_and_where_it_leads(tmp_path):
    prepared = prepared_of(tmp_path, "deployments.decode.balancing.bytes_per_step=1000000")
    start, size = prepared.assumed.placement, prepared.slot_bytes
    assert size == 3 * MODEL.hidden * MODEL.moe.intermediate * 2
    target = place(
        prepared.assumed.load_LE, ranks=4, ranks_per_node=4, redundant_experts=4, balanced=True, groups=1
    )
    topology, taken, ended = Topology(nodes=1, ranks_per_node=4), Taken(), list[str]()
    plan = plan_migration(start, target, topology)
    epochs = Epochs(prepared, ("decode-0",))
    mover = VirtualMover(
        instance=taken,  # type: ignore[arg-type]
        clock=Clock(),
        epochs=epochs,
        topology=topology,
        ended=ended.append,
        placement=start,
    )
    alone = mover.seconds_per_byte
    assert size * alone == pytest.approx(prepared.cost.links.bulk(size, local=True))
    mover.aim(NewPlacement.of(1, start, target, np.stack([plan.layer_M, plan.slot_M, plan.source_M])), 0.0)
    assert mover.busy
    assert taken.moves is not None
    units = taken.moves.units
    assert len(units) == 3, "every layer gets other experts"
    for layer, unit in enumerate(units):
        mine = plan.layer_M == layer
        leaving, coming = (int(np.bincount(slots[mine] // 9).max()) for slots in (plan.source_M, plan.slot_M))
        assert unit.turns == -(-leaving * size // 1_000_000)
        assert 0 < unit.seconds <= max(leaving, coming) * size * alone * (1 + 1e-9), "over NVLink"
        assert 0 < unit.commit_seconds < 1e-3
    drawn = [taken.moves.committed(count) for count in (1, 2, 3)]
    assert all(times is not None for times in drawn)
    assert mover.placement.slot_to_expert_LS.tolist() == target.slot_to_expert_LS.tolist()
    assert mover.placement.epoch == start.epoch + 3
    assert (mover.busy, ended, epochs.times("decode-0")) == (False, [""], drawn[-1])


def test_windows_that_end_while_the_solver_thinks_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(balancer, "SOLVER_SECONDS_PER_SLOT", 0.01)
    plan = make_plan(tmp_path, *LIVE, "deployments.decode.balancing.interval_tokens=100")
    report = simulated(plan, requests(40), (), SKEWED)
    balancing = of(report, "decode").balancing
    assert balancing.late_windows > balancing.decisions > 0
    assert any("balancing.interval_tokens is short" in w for w in report.warnings)
    first, second = balancing.rebalances[:2]
    assert second.decided - first.decided >= 0.01 * 3 * 36
