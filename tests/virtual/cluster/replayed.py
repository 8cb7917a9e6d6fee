"""A trace that real ranks of one unified instance run step by step, and the virtual cluster after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_runtime.launch.preflight import preflight
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cluster.simulate import Cluster
from moe_runtime.virtual.cluster.times import StepTimes, plain_cost
from moe_runtime.virtual.cost.shapes import StepCost, StepShape
from tests.virtual.cluster.small import Kept

BLOCK = 16


@dataclass(frozen=True)
class Sent:
    """A request that is there before turn `turn`; `common` tokens, whole blocks, begin all prompts alike."""

    turn: int
    rank: int
    common: int
    own: int
    output: int


def draw_trace(ranks: int, count: int, *, turns: int, seed: int) -> list[Sent]:
    """Requests for all ranks; those before turn 0 keep every rank busy until the last has come.

    None is for turn 1: at depth 1 that is at the same moment as turn 0.
    """
    rng = np.random.default_rng(seed)
    busy = [Sent(0, rank, BLOCK, 5 + rank, turns + 4) for rank in range(ranks)]
    return busy + [
        Sent(
            turn=int(rng.choice([0, *range(2, turns + 1)])),
            rank=int(rng.integers(0, ranks)),
            common=BLOCK * int(rng.integers(0, 3)),
            own=int(rng.integers(1, 30)),
            output=int(rng.integers(1, 9)),
        )
        for _ in range(count)
    ]


class Replay:
    """Every step takes what it took: `seconds[n]` is of step n. `at` says which comes next."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = seconds
        self.cluster: Cluster | None = None

    def step(self, shape: StepShape) -> StepCost:
        return self.run(shape, 1)[0]

    def run(self, shape: StepShape, steps: int) -> tuple[StepCost, StepCost]:
        assert self.cluster is not None
        (instance,) = self.cluster.instances.values()
        taken = self._seconds[instance.step : instance.step + steps]
        assert len(taken) == steps, f"the engine took {len(self._seconds)} steps, this is more"
        total = 0.0
        for seconds in taken:
            total += seconds
        return plain_cost(total), plain_cost(taken[-1])


def virtual_run(
    plan: Path, overrides: Sequence[str], sent: Sequence[Sent], walls: Sequence[float], times: StepTimes
) -> Kept:
    """The same trace in virtual time; a request arrives in the middle of the step before its turn."""
    flight = preflight(plan, overrides, check_tensors=False)
    (deployment,) = flight.effective.deployments
    starts = np.concatenate([[0.0], np.cumsum(walls)])
    requests = []
    for index, one in enumerate(sent):
        # At depth 1 a turn is held when the step before its own begins.
        began = max(0, one.turn - deployment.scheduler.pipeline_depth)
        at = 0.0 if began == 0 else float(starts[began - 1] + starts[began]) / 2
        own = -(-one.own // BLOCK)
        requests.append(
            VirtualRequest(
                index=index,
                at=at,
                input_length=one.common + one.own,
                output_length=one.output,
                hash_ids=(*range(one.common // BLOCK), *(1000 * (index + 1) + i for i in range(own))),
                block_tokens=BLOCK,
                rank=one.rank,
            )
        )
    kept = Kept()
    cluster = Cluster(
        flight.effective, flight.model, times={deployment.name: times}, kv_seconds=float, listener=kept
    )
    if isinstance(times, Replay):
        times.cluster = cluster
    cluster.run(sorted(requests, key=lambda r: (r.at, r.index)))
    return kept
