"""A simulation from a plan to its evidence: loads and cost models, scripted events, the cluster.

Owns how the parts of `virtual` are joined. Reads no file and knows no command line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from moe_runtime.plan.effective import EffectiveDeployment, EffectivePlan
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cluster.events import ScriptedEvent
from moe_runtime.virtual.cluster.records import RequestEnd
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cluster.simulate import simulate
from moe_runtime.virtual.cluster.times import ModelTimes
from moe_runtime.virtual.run.collect import Collector
from moe_runtime.virtual.run.evidence import Simulated
from moe_runtime.virtual.run.prepare import Prepared
from moe_runtime.virtual.run.rebalance import rebalance
from moe_runtime.virtual.run.script import RebalanceAt, Scripted


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

    `on_request` is called when a request ends. A deployment that balances moves to the balancer's placement
    once it has run `interval_tokens` rows.
    """
    deployment_of = {one.name: one.deployment for one in plan.instances}
    moves = [e for e in scripted if isinstance(e, RebalanceAt)]
    for d in plan.deployments:
        if d.balancing.enabled:
            at = _first_interval(d, requests)
            moves += [RebalanceAt(instance=n, at=at) for n, of in deployment_of.items() if of == d.name]
    balanced: dict[str, Prepared] = {
        name: prepared[name].balanced() for name in {deployment_of[m.instance] for m in moves}
    }
    events: list[ScriptedEvent] = [e for e in scripted if not isinstance(e, RebalanceAt)]
    for move in moves:
        name = deployment_of[move.instance]
        events.append(rebalance(move.instance, move.at, prepared[name], balanced[name]))
    collector = _Heard(plan, requests[-1].at, on_request)
    simulate(
        plan,
        model,
        requests,
        times={name: ModelTimes(p.cost) for name, p in prepared.items()},
        kv_seconds=kv_seconds(plan, prepared),
        listener=collector,
        events=events,
    )
    evidence = Simulated(collector, {n: balanced.get(n, p).loads for n, p in prepared.items()})
    tokens = [r.last_token for r in evidence.outcomes if r.last_token is not None]
    return Run(evidence, max([requests[-1].at, evidence.last_step_end or 0.0, *tokens]))


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


def _first_interval(deployment: EffectiveDeployment, requests: Sequence[VirtualRequest]) -> float:
    """When about `interval_tokens` rows of an instance have arrived; the last arrival if they never do."""

    def rows(r: VirtualRequest) -> int:
        prompt, output = deployment.name != "decode", deployment.name != "prefill"
        return r.input_length * prompt + r.output_length * output

    asked = deployment.balancing.interval_tokens * deployment.instances
    so_far = zip(accumulate(map(rows, requests)), requests, strict=True)
    return next((r.at for total, r in so_far if total >= asked), requests[-1].at)
