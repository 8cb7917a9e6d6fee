"""A simulation from a plan to its evidence: loads and cost models, scripted events, the cluster.

Owns how the parts of `virtual` are joined. Reads no file and knows no command line.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.report.records import F64
from moe_runtime.report.schema_time import Balancing
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cluster.clock import Clock
from moe_runtime.virtual.cluster.events import Failure, Rebalance, ScriptedEvent
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.records import RequestEnd
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cluster.simulate import Change, MakeBalancer, simulate
from moe_runtime.virtual.cluster.times import ModelTimes
from moe_runtime.virtual.run.balancer import DecisionLog, LiveBalancer
from moe_runtime.virtual.run.collect import Collector
from moe_runtime.virtual.run.course import LoadDrift, LoadShift, course
from moe_runtime.virtual.run.epochs import Epochs
from moe_runtime.virtual.run.evidence import Simulated
from moe_runtime.virtual.run.history import LoadHistory
from moe_runtime.virtual.run.prepare import Prepared
from moe_runtime.virtual.run.script import FailureAt, Scripted


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation left; `end` is when its last token came or its last step ended, virtual seconds."""

    evidence: Simulated
    end: float


def run_simulation(
    plan: EffectivePlan,
    model: ModelSpec,
    prepared: Mapping[str, Prepared],
    requests: Sequence[VirtualRequest],
    *,
    scripted: Sequence[Scripted] = (),
    on_request: Callable[[], None] = lambda: None,
) -> Run:
    """Serve the requests, at least one, in order of time. `prepared` by deployment.

    `on_request` is called when a request ends. InputError for events that cannot be.
    """
    loads = _Loads(plan, prepared, scripted)
    collector = _Heard(plan, requests[-1].at, on_request)
    simulate(
        plan,
        model,
        requests,
        times={name: ModelTimes(p.cost) for name, p in prepared.items()},
        kv_seconds=kv_seconds(plan, prepared),
        listener=collector,
        events=_events(plan, prepared, scripted),
        balancers=loads.balancers(scripted),
        changes=loads.changes,
    )
    evidence = Simulated(collector, loads.histories(), loads.balancing())
    tokens = [r.last_token for r in evidence.outcomes if r.last_token is not None]
    return Run(evidence, max([requests[-1].at, evidence.last_step_end or 0.0, *tokens]))


class _Loads:
    """Expert loads and placements of all deployments, and who changes them."""

    def __init__(
        self, plan: EffectivePlan, prepared: Mapping[str, Prepared], scripted: Sequence[Scripted]
    ) -> None:
        self._plan = plan
        self._epochs = {
            name: Epochs(p, tuple(one.name for one in plan.instances if one.deployment == name))
            for name, p in prepared.items()
        }
        self._logs = {name: DecisionLog() for name in prepared}
        self._made: list[LiveBalancer] = []
        shifts = [e for e in scripted if isinstance(e, LoadShift)]
        drifts = [e for e in scripted if isinstance(e, LoadDrift)]
        self._courses = {
            name: course(p, [e for e in shifts if e.of(name)], [e for e in drifts if e.of(name)])
            for name, p in prepared.items()
        }

    def balancers(self, scripted: Sequence[Scripted]) -> dict[str, MakeBalancer]:
        """Of instances that balance, or are told to once."""
        asked = {e.instance for e in scripted if isinstance(e, Rebalance)}
        return {
            one.name: partial(self._make, one.deployment)
            for one in self._plan.instances
            if one.name in asked or self._plan.deployment(one.deployment).balancing.enabled
        }

    def changes(self, instances: Mapping[str, Instance]) -> Iterator[Change]:
        """Of the loads, in order of time."""
        streams = [self._of(name, instances) for name in self._epochs]
        return heapq.merge(*streams, key=lambda change: change[0])

    def histories(self) -> dict[str, LoadHistory]:
        return {name: epochs.history for name, epochs in self._epochs.items()}

    def balancing(self) -> dict[str, Balancing]:
        """What was decided, once the simulation is over."""
        for balancer in self._made:
            balancer.end()
        return {name: log.told() for name, log in self._logs.items()}

    def _make(self, deployment: str, instance: Instance, clock: Clock) -> LiveBalancer:
        self._made.append(LiveBalancer(instance, clock, self._epochs[deployment], self._logs[deployment]))
        return self._made[-1]

    def _of(self, name: str, instances: Mapping[str, Instance]) -> Iterator[Change]:
        epochs = self._epochs[name]
        mine = [instances[one.name] for one in self._plan.instances if one.deployment == name]

        def change(load_LE: F64, now: float) -> None:
            epochs.load(now, load_LE)
            for instance in mine:
                instance.set_times(epochs.times(instance.name))

        return ((at, partial(change, load_LE)) for at, load_LE in self._courses[name])


def _events(
    plan: EffectivePlan, prepared: Mapping[str, Prepared], scripted: Sequence[Scripted]
) -> list[ScriptedEvent]:
    """Those of the cluster; an instance that is started anew reads its weights over the network."""
    deployment_of = {one.name: one.deployment for one in plan.instances}
    out: list[ScriptedEvent] = []
    for event in scripted:
        if isinstance(event, FailureAt):
            down = None
            if event.restart_after is not None:
                down = event.restart_after + prepared[deployment_of[event.instance]].read_seconds
            out.append(Failure(instance=event.instance, at=event.at, down=down))
        elif not isinstance(event, LoadShift | LoadDrift):
            out.append(event)
    return out


class _Heard(Collector):
    """A collector that says of every request that it is over."""

    def __init__(self, plan: EffectivePlan, last_arrival: float, on_request: Callable[[], None]) -> None:
        tokens = {one.name: plan.deployment(one.deployment).kv_cache.block_tokens for one in plan.instances}
        ranks = {one.name: len(one.ranks) for one in plan.instances}
        super().__init__(ranks, last_arrival=last_arrival, block_tokens=tokens)
        self._on_request = on_request

    def request(self, end: RequestEnd) -> None:
        super().request(end)
        self._on_request()


def kv_seconds(plan: EffectivePlan, prepared: Mapping[str, Prepared]) -> Callable[[int], float]:
    """Of a prompt's KV from rank to rank, alone on its links: scale-up links if there is one node."""
    first = plan.deployments[0]
    links, token_bytes, local = prepared[first.name].cost.links, first.kv.token_bytes, plan.cluster.nodes == 1
    return lambda tokens: links.bulk(token_bytes * tokens, local=local)
