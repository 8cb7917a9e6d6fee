"""simulate: a plan's instances serve a trace in virtual time. The virtual cluster's composition root."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

from moe_runtime.engine.limits import agree_limits, chunk_budget, scheduler_limits
from moe_runtime.errors import InputError
from moe_runtime.frontend.admission import Admission, AdmissionLimits
from moe_runtime.frontend.router import Router, Target, role_router
from moe_runtime.plan.effective import EffectiveDeployment, EffectivePlan, InstancePlan
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cluster.agreement import Agreement
from moe_runtime.virtual.cluster.balancing import Balancer
from moe_runtime.virtual.cluster.clock import Clock, Kind
from moe_runtime.virtual.cluster.desk import Desk
from moe_runtime.virtual.cluster.events import Failure, Rebalance, ScriptedEvent, Slowdown
from moe_runtime.virtual.cluster.handovers import Handovers
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.network import Network
from moe_runtime.virtual.cluster.overlap import OverlapGain
from moe_runtime.virtual.cluster.ranks import Ranks
from moe_runtime.virtual.cluster.records import Listener
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cluster.times import StepTimes

MakeBalancer = Callable[[Instance, Clock], Balancer]
Change = tuple[float, Callable[[float], None]]
NO_BALANCERS: Mapping[str, MakeBalancer] = MappingProxyType({})


class Cluster:
    """A simulation: build, `run`, look at it. Arguments as of `simulate`."""

    def __init__(
        self,
        plan: EffectivePlan,
        model: ModelSpec,
        *,
        times: Mapping[str, StepTimes],
        kv_seconds: Callable[[int], float],
        listener: Listener,
        events: Sequence[ScriptedEvent] = (),
        admission: AdmissionLimits | None = None,
        balancers: Mapping[str, MakeBalancer] = NO_BALANCERS,
        changes: Callable[[Mapping[str, Instance]], Iterable[Change]] | None = None,
        fast_forward: bool = True,
    ) -> None:
        _check(plan, events, balancers)
        self.clock, self.network = Clock(), Network()
        self._plan, self._model, self._balancers = plan, model, balancers
        self._fast_forward, self._arriving = fast_forward, True
        self.instances: dict[str, Instance] = {}
        self.handovers = Handovers(
            self.instances, clock=self.clock, network=self.network, kv_seconds=kv_seconds
        )
        self.desk = Desk(
            self.instances,
            routers={d.name: _router(plan, d, bounded=admission is not None) for d in plan.deployments},
            handovers=self.handovers,
            clock=self.clock,
            listener=listener,
            admission=None if admission is None else Admission(admission),
        )
        for one in plan.instances:
            self.instances[one.name] = self._instance(one, times, listener)
        self._changes = iter(changes(self.instances) if changes is not None else ())
        for event in events:
            self._schedule(event)

    def run(self, arrivals: Iterable[VirtualRequest]) -> None:
        """Serve all of them to their ends. InputError if they do not come in order of time."""
        self._next(iter(arrivals))
        self._next_change()
        with _rare_collections():
            while self._step():
                pass
        assert not self.desk.num_requests, "requests wait for what will never happen"

    # -- inside -------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Let the next thing happen; False if nothing ever will."""
        due, end = self.clock.peek(), self.network.next_end()
        if end is not None and (due is None or end <= due):
            copy = self.network.pop_ended(end)
            assert copy is not None
            self.clock.now = end
            self.handovers.copied(copy)
        elif due is not None:
            self.clock.step()
        return due is not None or end is not None

    def _next(self, arrivals: Iterator[VirtualRequest]) -> None:
        """Wait for the next arrival."""
        request = next(arrivals, None)
        if request is None:
            self._arriving = False
            return
        if request.at < self.clock.now:
            raise InputError(f"request {request.index} arrives at {request.at} s, before the one ahead of it")

        def arrive() -> None:
            self.desk.arrive(request)
            self._next(arrivals)

        self.clock.at(request.at, Kind.OUTSIDE, arrive)

    def _next_change(self) -> None:
        """Wait for the next change of what steps take, if it can still matter."""
        if not (self._arriving or self.desk.num_requests):
            return
        due = next(self._changes, None)
        if due is None:
            return
        at, change = due

        def happen() -> None:
            change(at)
            self._next_change()

        self.clock.at(at, Kind.OUTSIDE, happen)

    def _outside(self) -> float | None:
        """When something happens next."""
        times = [t for t in (self.clock.peek(), self.network.next_end()) if t is not None]
        return min(times, default=None)

    def _instance(self, one: InstancePlan, times: Mapping[str, StepTimes], listener: Listener) -> Instance:
        deployment = self._plan.deployment(one.deployment)
        ranks, agreement = self._parts(one)
        instance = Instance(
            name=one.name,
            ranks=ranks,
            agreement=agreement,
            depth=deployment.scheduler.pipeline_depth,
            times=times[deployment.name],
            overlap=OverlapGain(agreement.limits),
            clock=self.clock,
            outside=self._outside,
            listener=listener,
            desk=self.desk,
            fast_forward=self._fast_forward,
        )
        self._give_balancer(instance)
        return instance

    def _parts(self, one: InstancePlan) -> tuple[Ranks, Agreement]:
        """What an instance begins a life with."""
        deployment = self._plan.deployment(one.deployment)
        ranks = Ranks(
            scheduler_limits(deployment, max_positions=self._model.max_positions),
            len(one.ranks),
            depth=deployment.scheduler.pipeline_depth,
            lazy=self._fast_forward,
        )
        budget = chunk_budget(deployment, self._plan.slo)
        return ranks, Agreement(agree_limits(deployment), (True,) * len(one.ranks), budget)

    def _give_balancer(self, instance: Instance) -> None:
        make = self._balancers.get(instance.name)
        instance.balancer = None if make is None else make(instance, self.clock)

    def _schedule(self, event: ScriptedEvent) -> None:
        instance, at = self.instances[event.instance], self.clock.at
        if isinstance(event, Failure):
            at(event.at, Kind.OUTSIDE, partial(self._fail, event))
        elif isinstance(event, Slowdown):
            at(event.start, Kind.OUTSIDE, partial(instance.slow_down, event))
            at(event.end, Kind.OUTSIDE, _nothing)  # no run of steps goes beyond it
        else:
            at(event.at, Kind.OUTSIDE, partial(_force, instance))

    def _fail(self, event: Failure) -> None:
        instance = self.instances[event.instance]
        self.desk.fail(event.instance)
        if event.down is not None:
            # The record of a step that the failure cut short is whole: what follows it, comes after it.
            up = max(event.at + event.down, instance.free_at)
            self.clock.at(up, Kind.OUTSIDE, partial(self._restart, instance, instance.life))

    def _restart(self, instance: Instance, life: int) -> None:
        if instance.life != life:
            return  # it has failed again on its way
        one = next(one for one in self._plan.instances if one.name == instance.name)
        instance.restart(*self._parts(one))
        self._give_balancer(instance)
        self.desk.set_down(instance.name, down=False)


def simulate(
    plan: EffectivePlan,
    model: ModelSpec,
    arrivals: Iterable[VirtualRequest],
    *,
    times: Mapping[str, StepTimes],
    kv_seconds: Callable[[int], float],
    listener: Listener,
    events: Sequence[ScriptedEvent] = (),
    admission: AdmissionLimits | None = None,
    balancers: Mapping[str, MakeBalancer] = NO_BALANCERS,
    changes: Callable[[Mapping[str, Instance]], Iterable[Change]] | None = None,
) -> None:
    """Run the plan's control plane over the arrivals, in order of time, until every request has ended.

    times       seconds of steps, by name of deployment
    kv_seconds  from tokens to the seconds their KV takes from a prefill to a decode rank that share no link
    listener    hears everything
    events      what is scripted to happen
    admission   what a server lets in, and no more than ranks may promise; None: everything, as a replay does
    balancers   who moves experts of instances, made anew when one is started anew
    changes     (time, what to do then) in order of time: changes of what steps take

    Raises InputError for events that name what the plan does not have, and for arrivals out of order.
    """
    cluster = Cluster(
        plan,
        model,
        times=times,
        kv_seconds=kv_seconds,
        listener=listener,
        events=events,
        admission=admission,
        balancers=balancers,
        changes=changes,
    )
    cluster.run(arrivals)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Nothing in a simulation refers to itself: to look for garbage that does is nearly all wasted."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _router(plan: EffectivePlan, deployment: EffectiveDeployment, *, bounded: bool) -> Router:
    kv = deployment.kv_cache
    return role_router(
        deployment.name,
        [
            Target(one.name, rank)
            for one in plan.instances
            if one.deployment == deployment.name
            for rank in range(len(one.ranks))
        ],
        kv_tokens=kv.blocks * kv.block_tokens,
        max_sequences=deployment.scheduler.max_sequences,
        bounded=bounded,
    )


def _force(instance: Instance) -> None:
    """Nobody is there to decide while it is down."""
    if instance.balancer is not None and not instance.failed:
        instance.balancer.force()


def _check(
    plan: EffectivePlan, events: Sequence[ScriptedEvent], balancers: Mapping[str, MakeBalancer]
) -> None:
    ranks = {one.name: len(one.ranks) for one in plan.instances}
    for event in events:
        if event.instance not in ranks:
            raise InputError(f"instance {event.instance!r}: the plan has {', '.join(ranks)}")
        if isinstance(event, Rebalance) and event.instance not in balancers:
            raise InputError(f"{event.instance} has no balancer that could be asked to move experts")
        if isinstance(event, Slowdown):
            if not 0 <= event.rank < ranks[event.instance]:
                raise InputError(f"rank {event.rank}: {event.instance} has {ranks[event.instance]}")
            if event.factor < 1 or event.end < event.start:
                raise InputError(
                    f"a slowdown by {event.factor} from {event.start} to {event.end} s: the factor must be at"
                    " least 1, the end not before the start"
                )


def _nothing() -> None:
    """A moment at which steps must be looked at."""
