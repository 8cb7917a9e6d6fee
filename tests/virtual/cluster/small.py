"""Small plans, exact step times and a listener that keeps everything, for tests of the virtual cluster."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.plan.resolve import resolve
from moe_runtime.plan.schema import Plan
from moe_runtime.virtual.cluster.clock import Clock
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.moving import Moves, MoveUnit
from moe_runtime.virtual.cluster.records import RequestEnd, StepRun
from moe_runtime.virtual.cluster.simulate import Cluster
from moe_runtime.virtual.cluster.times import plain_cost
from moe_runtime.virtual.cost.shapes import StepCost, StepShape
from tests.spec.model_specs import SMALL_DEEPSEEK

SCHEDULER = {"max_batch_tokens": 64, "max_sequences": 6, "chunk_tokens": 24}
KV = {"block_tokens": 4, "blocks": 40}
TICK = 2.0**-20


def plan(
    deployments: Mapping[str, Mapping[str, Any]],
    *,
    scheduler: Mapping[str, Any] | None = None,
    kv: Mapping[str, Any] | None = None,
) -> EffectivePlan:
    """A plan on one CPU host; what a deployment does not say is small, and one micro-batch."""
    common = {
        "scheduler": SCHEDULER | dict(scheduler or {}),
        "kv_cache": KV | dict(kv or {}),
        "overlap": {"micro_batches": 1},
    }
    sections = {name: common | dict(given) for name, given in deployments.items()}
    ranks = sum(s.get("instances", 1) * s["expert_parallel"] for s in sections.values())
    tree = {
        "model": {"path": "/nowhere", "dtype": "float32"},
        "cluster": {"nodes": 1, "ranks_per_node": ranks, "device": "cpu", "hardware": "cpu-host"},
        "deployments": sections,
    }
    return resolve(Plan.model_validate(tree), SMALL_DEEPSEEK)


@dataclass(frozen=True)
class ExactTimes:
    """Multiples of a power of two: many steps at once take what single ones do, to the last bit."""

    tick: float = TICK

    def step(self, shape: StepShape) -> StepCost:
        return plain_cost(_ticks(shape, 0) * self.tick)

    def run(self, shape: StepShape, steps: int) -> tuple[StepCost, StepCost]:
        ticks = [_ticks(shape, step) for step in range(steps)]
        return plain_cost(sum(ticks) * self.tick), plain_cost(ticks[-1] * self.tick)


@dataclass
class Restless:
    """A balancer whose instance moves something after every window of `interval` rows.

    `draw` makes the units and the timeout of an attempt; steps are twice as quick after every other commit.
    """

    instance: Instance
    clock: Clock
    interval: int
    draw: Callable[[], tuple[tuple[MoveUnit, ...], float]]
    windows: list[float] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    rows: int = 0
    commits: int = 0
    busy: bool = False
    last: int = 0

    def steps_left(self, rows: int) -> int:
        return max(1, -(-(self.interval - self.rows) // rows))

    def count(self, run: StepRun) -> bool:
        self.rows += run.decision.rows * run.steps
        full = self.rows >= self.interval
        if full:
            self.rows = 0
        return full

    def window_ended(self) -> None:
        self.windows.append(self.clock.now)
        if not self.busy:
            self.busy = True
            units, timeout = self.draw()
            moves = Moves(units=units, timeout=timeout, committed=self.committed, dropped=self.dropped)
            self.instance.move(moves)
            self.last = len(units)

    def force(self) -> None:
        self.instance.give_up("it was asked for")

    def stop(self) -> None:
        self.ended.append("failed")

    def committed(self, count: int) -> ExactTimes:
        self.commits += 1
        if count == self.last:
            self.busy = False
            self.ended.append("")
        return ExactTimes(TICK / (1 + self.commits % 2))

    def dropped(self, reason: str) -> None:
        self.busy = False
        self.ended.append(reason)


def _ticks(shape: StepShape, step: int) -> int:
    context = shape.decode_context_R + shape.decode_sequences_R * step
    rows = int(shape.tokens_R.max())
    # Two micro-batches pay from nine rows on.
    fixed = 1024 + 32 * rows if shape.micro_batches == 1 else 1152 + 16 * rows
    return fixed + int(context.max()) + int(shape.prefill_pairs_R.max())


def kv_seconds(tokens: int) -> float:
    """Exact, too."""
    return (200 + 8 * tokens) * TICK


@dataclass
class Kept:
    """Everything a listener hears."""

    runs: list[StepRun] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)

    def steps(self, run: StepRun) -> None:
        self.runs.append(run)

    def request(self, end: RequestEnd) -> None:
        self.ends.append(end)

    def of(self, instance: str) -> list[StepRun]:
        return [run for run in self.runs if run.instance == instance]


def small_cluster(where: EffectivePlan, kept: Kept, **more: Any) -> Cluster:
    """Of SMALL_DEEPSEEK with exact times; `more` as of `Cluster`."""
    return Cluster(
        where,
        SMALL_DEEPSEEK,
        times={d.name: ExactTimes() for d in where.deployments},
        kv_seconds=kv_seconds,
        listener=kept,
        **more,
    )


def merged(runs: list[StepRun]) -> list[StepRun]:
    """Runs of one instance; those of the same rows that follow each other without a pause are one."""
    out: list[StepRun] = []
    for run in runs:
        if out and _continues(out[-1], run):
            last = out[-1]
            out[-1] = replace(
                last,
                steps=last.steps + run.steps,
                seconds=last.seconds + run.seconds,
                kv_used_R=run.kv_used_R,
                cost=last.cost.plus(run.cost),
            )
        else:
            out.append(run)
    return out


def _continues(last: StepRun, run: StepRun) -> bool:
    new = (
        run.prefill_R,
        run.cached_R,
        run.recomputed_R,
        run.preemptions_R,
        last.prefill_R,
        last.recomputed_R,
    )
    return (
        last.start + last.seconds == run.start
        and last.decision == run.decision
        and np.array_equal(last.decode_R, run.decode_R)
        and not any(a.any() for a in new)
    )


def as_numbers(run: StepRun) -> tuple[Any, ...]:
    """A run in a form that compares."""
    arrays = (run.decode_R, run.prefill_R, run.cached_R, run.recomputed_R, run.preemptions_R, run.kv_used_R)
    decided = (run.first_step, run.steps, run.start, run.seconds, run.decision, run.cost)
    return (*decided, *(a.tolist() for a in arrays))
