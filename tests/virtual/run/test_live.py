"""The balancer decides live inside a simulation: loads change, and it sees and moves what it can."""

from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.engine.agree import StepDecision, StepKind
from moe_runtime.engine.balancing.wire import NewPlacement
from moe_runtime.errors import InputError
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import linear
from moe_runtime.placement.topology import Topology
from moe_runtime.virtual.cluster.clock import Clock
from moe_runtime.virtual.cluster.events import Rebalance
from moe_runtime.virtual.cluster.moving import Moves
from moe_runtime.virtual.cluster.records import StepRun
from moe_runtime.virtual.cluster.times import StepTimes, plain_cost
from moe_runtime.virtual.cost.balance import Drift
from moe_runtime.virtual.cost.loads import place
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.run import balancer
from moe_runtime.virtual.run.course import LoadDrift, LoadShift, course
from moe_runtime.virtual.run.epochs import Epochs
from moe_runtime.virtual.run.history import LoadHistory
from moe_runtime.virtual.run.loads import Assumed, DeploymentLoads, LoadChoice
from moe_runtime.virtual.run.mover import VirtualMover
from moe_runtime.virtual.run.prepare import Prepared, Workload, prepare
from moe_runtime.virtual.run.script import FailureAt
from moe_runtime.virtual.run.window import WindowCounter
from tests.virtual.run.small import MODEL, make_plan, placements, requests
from tests.virtual.run.test_simulation import bound, of, simulated

SKEWED = LoadChoice("power", 1.0)
LIVE = ("deployments.decode.balancing.enabled=true", "deployments.decode.balancing.interval_tokens=800")


def shift(at: float, to: str, mix: float = 1.0, deployment: str = "decode") -> LoadShift:
    return LoadShift(deployment=deployment, at=at, to=to, mix=mix, where="events.yaml:2")


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
        assert " moves in 3 layers take " in one.reason
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


def run_of(rows: list[int], steps: int, seconds: float = 1.0) -> StepRun:
    none, cost = np.zeros(2, np.int64), plain_cost(seconds)
    cost.parts["experts"] = seconds / 2
    return StepRun(
        instance="decode-0",
        first_step=0,
        steps=steps,
        start=0.0,
        seconds=seconds,
        decision=StepDecision(kind=StepKind.FORWARD, rows=sum(rows)),
        decode_R=np.array(rows, np.int64),
        prefill_R=none,
        cached_R=none,
        recomputed_R=none,
        preemptions_R=none,
        kv_used_R=none,
        cost=cost,
    )


def assumed(drift: float = 0.0) -> Assumed:
    return Assumed(
        load_LE=np.array([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]),
        placement=linear(num_layers=2, num_experts=4, num_ranks=2),
        redundant_experts=0,
        moe_layers=(1, 2),
        top_k=2,
        ranks_per_node=2,
        drift=Drift(common=drift, sequence=0.0),
        tokens_per_sequence=1.0,
    )


def test_a_window_holds_the_rows_of_its_steps_under_the_loads_of_their_time():
    what = assumed()
    counter = WindowCounter(assumed=what, interval=10_000, random=np.random.default_rng(0))
    assert counter.steps_left(3_000) == 4
    assert not counter.count(run_of([1_000, 2_000], 2), what.load_LE)
    assert counter.steps_left(3_000) == 2
    assert counter.count(run_of([1_000, 3_000], 1), what.load_LE[::-1].copy())
    window = counter.close()
    mean_LE = 2 * (6_000 * what.load_LE + 4_000 * what.load_LE[::-1]) / 10
    assert window.pairs_LE == pytest.approx(mean_LE, rel=0.1)
    assert (window.pairs_LE != mean_LE).any(), "counting is noisy"
    assert window.seconds_per_pair == pytest.approx(2 * 1.0 / (10_000 * 2 * 2))
    assert counter.steps_left(10_000) == 1
    assert not counter.close().pairs_LE.any()
    on_demand = WindowCounter(assumed=what, interval=None, random=np.random.default_rng(0))
    assert not on_demand.count(run_of([10**9, 10**9], 100), what.load_LE)
    assert on_demand.close().pairs_LE.any()


def test_steps_stray_and_a_window_of_many_strays_less():
    def spread(steps: int) -> float:
        counter = WindowCounter(assumed=assumed(0.3), interval=1, random=np.random.default_rng(1))
        found = []
        for _ in range(200):
            counter.count(run_of([50_000, 50_000], steps), counter.assumed.load_LE)
            found.append(counter.close().pairs_LE[0, 0] / steps / 20_000)
        return float(np.std(found))

    one, many = spread(1), spread(100)
    assert one == pytest.approx(0.3, rel=0.25)
    assert many == pytest.approx(one / 10, rel=0.3)


def test_what_a_sequence_adds_stays_with_it():
    """A hundred steps of the same hundred sequences tell no more of the others than one step does."""
    strays = replace(assumed(), drift=Drift(common=0.0, sequence=3.0), tokens_of_sequence=1e9)

    def spread(what: Assumed) -> float:
        counter = WindowCounter(assumed=what, interval=1, random=np.random.default_rng(1))
        found = []
        for _ in range(200):
            counter.count(run_of([50, 50], 10_000), what.load_LE)
            found.append(counter.close().pairs_LE[0, 0] / 200_000)
        return float(np.std(found))

    assert spread(strays) == pytest.approx(0.3, rel=0.25)
    assert spread(replace(strays, tokens_of_sequence=100.0)) == pytest.approx(0.03, rel=0.25)


def prepared_of(folder, *overrides: str) -> Prepared:
    plan = make_plan(folder, *overrides)
    return prepare(plan, MODEL, placements(plan), Workload(250.0, 45.0), SKEWED)["decode"]


def test_loads_shift_to_what_is_named(tmp_path):
    prepared = prepared_of(tmp_path)
    start_LE = prepared.assumed.load_LE / prepared.assumed.load_LE.sum(axis=1, keepdims=True)
    file = tmp_path / "other.npz"
    np.savez(file, load=np.arange(3 * 32).reshape(3, 32) + 1.0)
    shifts = [
        shift(9.0, "start"),
        shift(1.0, "topic:3"),
        shift(2.0, "uniform", mix=0.25),
        shift(3.0, str(file)),
        shift(4.0, "power:0.5"),
    ]
    found = dict(course(prepared, shifts, ()))
    assert list(found) == [1.0, 2.0, 3.0, 4.0, 9.0]
    assert np.sort(found[1.0], axis=1) == pytest.approx(np.sort(start_LE, axis=1))
    assert not np.array_equal(found[1.0], start_LE)
    assert found[2.0] == pytest.approx(0.75 * found[1.0] + 0.25 / 32)
    assert found[3.0][0, 31] == pytest.approx(32 / sum(range(1, 33)))
    assert found[4.0].max() / found[4.0].min() == pytest.approx(32**0.5)
    assert np.array_equal(found[9.0], start_LE)


def test_loads_drift_around_their_mean_for_a_while(tmp_path):
    prepared = prepared_of(tmp_path)
    drift = LoadDrift(
        deployment="decode", start=10.0, end=20.0, every=0.01, noise=0.3, correlation=0.9, seed=4
    )
    changes = list(course(prepared, [shift(15.0, "topic:1")], [drift]))
    assert [at for at, _ in changes] == pytest.approx([10 + i / 100 for i in range(1001)])
    start_LE, topic_LE = (prepared.assumed.load_LE, changes[-1][1])
    logs = np.log(np.stack([load_LE for _, load_LE in changes[:500]]) / start_LE)
    logs -= logs.mean(axis=2, keepdims=True)
    assert logs.std() == pytest.approx(0.3, rel=0.1)
    assert (logs[1:] * logs[:-1]).mean() / (logs**2).mean() == pytest.approx(0.9, abs=0.05)
    later = np.log(changes[700][1] / topic_LE)
    assert later.std() == pytest.approx(0.3, rel=0.3), "the drift goes on around the new mean"
    assert [load_LE.tolist() for _, load_LE in course(prepared, [shift(15.0, "topic:1")], [drift])] == [
        load_LE.tolist() for _, load_LE in changes
    ]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (
            "recorded",
            "events.yaml:2: to is 'recorded': must be start, topic:NUMBER, .* only loads of DeepSeek-V3",
        ),
        ("topic:x", "events.yaml:2: to is 'topic:x': a topic has a number"),
        ("weather", "must be start, topic:NUMBER"),
        ("none.csv", "events.yaml:2: to: none.csv: cannot be read"),
        ("{}/short.csv", r"has loads \[1, 3\]; the model's MoE layers and experts are \[3, 32\]"),
    ],
)
def test_loads_that_cannot_be_are_refused_before_anything_runs(tmp_path, to, message):
    (tmp_path / "short.csv").write_text("1,2,3\n")
    with pytest.raises(InputError, match=message):
        course(prepared_of(tmp_path), [shift(1.0, to.format(tmp_path))], ())


def test_figures_of_balance_are_those_of_the_steps_with_their_loads():
    one = DeploymentLoads(assumed())
    even = DeploymentLoads(replace(one.assumed, load_LE=np.ones((2, 4))))
    history = LoadHistory({"decode-0": one, "decode-1": one})
    history.change("decode-0", 5.0, even)
    tokens = np.full(3, 1e7)
    found = history.step_balancedness("decode-0", np.array([0.0, 4.9, 5.0]), tokens)
    assert found == pytest.approx([5 / 7, 5 / 7, 1.0], abs=0.02)
    assert history.step_balancedness("decode-1", np.array([0.0, 4.9, 5.0]), tokens)[2] == found[0]
    ran = {
        "decode-0": (np.array([1.0, 6.0]), np.array([10.0, 20.0])),
        "decode-1": (np.zeros(1), np.full(1, 10.0)),
    }
    (first, second) = history.layers(ran, 1e7)
    assert (first.layer, first.steps, second.layer) == (1, 40, 2)
    assert first.mean == pytest.approx((5 / 7 + 1) / 2, abs=0.02), "half of the steps were even"
    assert first.of_sum == pytest.approx(1 / (0.5 * 1.4 + 0.5), abs=0.01)
    assert first.p5 == pytest.approx(5 / 7, abs=0.02)


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
