"""LiveBalancer: the engine's controller, window and policy decide in virtual time where experts are.

Owns what takes how long between a window and a decision, and the log of decisions for the report. What
decides is `engine.balancing.controller` and `thinker`, the code of a real run.
"""

import zlib
from dataclasses import dataclass, field

import msgspec
import numpy as np

from moe_runtime.engine.balancing.controller import Controller, Settings
from moe_runtime.engine.balancing.merge import LoadMerge, MergedWindow
from moe_runtime.engine.balancing.thinker import Answer, Question, Thinker
from moe_runtime.engine.balancing.wire import moves_from
from moe_runtime.eplb.replay import balancedness
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.topology import Topology
from moe_runtime.report.schema_time import Balancing, Outcome, Rebalance
from moe_runtime.virtual.cluster.clock import Clock, Kind
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.records import StepRun
from moe_runtime.virtual.run.epochs import Epochs
from moe_runtime.virtual.run.mover import VirtualMover
from moe_runtime.virtual.run.window import WindowCounter

SOLVER_SECONDS_PER_SLOT = 1e-5  # of a layer: a tenth of a second for 58 layers of 256 experts


@dataclass(slots=True)
class DecisionLog:
    """Decisions of the balancers of a deployment. `late` windows ended while the solver was at work."""

    decisions: int = 0
    waits: int = 0
    late: int = 0
    rebalances: list[Rebalance] = field(default_factory=list)

    def told(self) -> Balancing:
        """For the report."""
        return Balancing(
            decisions=self.decisions,
            waits=self.waits,
            late_windows=self.late,
            rebalances=tuple(sorted(self.rebalances, key=lambda r: (r.decided, r.instance))),
        )


@dataclass(slots=True)
class VirtualSolver:
    """Thinks at once, and says so `seconds` later."""

    clock: Clock
    seconds: float
    thinker: Thinker = field(default_factory=Thinker)
    due: float = 0.0
    _answer: Answer | None = None

    @property
    def busy(self) -> bool:
        """A question is open."""
        return self._answer is not None

    def ask(self, question: Question) -> None:
        self._answer, self.due = self.thinker.think(question), self.clock.now + self.seconds

    def answer(self) -> Answer | None:
        if self._answer is None or self.clock.now < self.due:
            return None
        answer, self._answer = self._answer, None
        return answer

    def restart(self) -> None:
        self.thinker, self._answer = Thinker(), None

    def close(self) -> None:
        self._answer = None


class LiveBalancer:
    """Of one life of an instance, from the placement that the plan starts with.

    Where the plan has balancing off it only counts, and decides when it is asked to (`force`).
    """

    def __init__(self, instance: Instance, clock: Clock, epochs: Epochs, log: DecisionLog) -> None:
        prepared, name = epochs.prepared, instance.name
        plan, start = prepared.deployment, prepared.assumed.placement
        self._clock, self._epochs, self._log, self._name = clock, epochs, log, name
        if epochs.placement(name) is not start:
            instance.set_times(epochs.place(clock.now, name, start))
        ranks, per_node = start.num_ranks, prepared.assumed.ranks_per_node
        nodes = ranks // per_node if ranks % per_node == 0 else 1
        self._mover = VirtualMover(
            instance=instance,
            clock=clock,
            epochs=epochs,
            topology=Topology(nodes=nodes, ranks_per_node=ranks // nodes),
            ended=self._ended,
            placement=start,
        )
        self._counter = WindowCounter(
            assumed=prepared.assumed,
            interval=plan.balancing.interval_tokens if plan.balancing.enabled else None,
            random=np.random.default_rng([prepared.assumed.seed, zlib.crc32(name.encode()), instance.life]),
        )
        self._solver = VirtualSolver(clock, SOLVER_SECONDS_PER_SLOT * start.slot_to_expert_LS.size)
        moe = prepared.model.moe
        self._controller = Controller(
            merge=LoadMerge(ranks, start.num_layers, start.num_experts),
            solver=self._solver,
            settings=Settings(
                to_fill=start.num_experts + plan.redundant_experts,
                horizon_windows=plan.balancing.horizon_windows,
                min_gain=plan.balancing.min_gain,
                nodes=nodes,
                groups=1 if nodes == 1 or moe.shared_slots else moe.router.num_groups,
            ),
            mover=self._mover,
            send=lambda message: None,  # the mover is all ranks' at once
            started=clock.now,
        )
        # Windows that wait for their last step to end; for the solver.
        self._full: list[MergedWindow] = []
        self._late: list[MergedWindow] = []
        self._open: Rebalance | None = None
        self._awaited = self._stopped = False

    # -- what the instance says (`cluster.balancing.Balancer`) ----------------------------------

    def steps_left(self, rows: int) -> int:
        return self._counter.steps_left(rows)

    def count(self, run: StepRun) -> bool:
        full = self._counter.count(run, self._epochs.load_LE)
        if full:
            self._full.append(self._counter.close())
        return full

    def window_ended(self) -> None:
        self._late.append(self._full.pop(0))
        self._log.late += self._solver.busy
        self._consider()

    def force(self) -> None:
        if self._counter.interval is None:
            self._late.append(self._counter.close())
        self._controller.force()
        self._consider()

    def stop(self) -> None:
        self._stopped = True
        self._close("failed", f"{self._name} failed")

    def end(self) -> None:
        """The simulation is over."""
        self._close("unfinished")

    # -- inside -------------------------------------------------------------------------------

    def _consider(self) -> None:
        """Have the controller take an answer that is due, see windows, and ask what there is to ask."""
        decided = True
        while decided:
            if not self._solver.busy:
                for window in self._late:
                    self._controller.observe(window)
                self._late.clear()
            newest, before = self._controller.newest, self._mover.placement
            self._controller.poll(self._clock.now)
            decided = self._controller.newest is not newest
            if decided:
                self._note(self._controller.newest, before)
        if self._solver.busy and not self._awaited:
            self._awaited = True
            self._clock.at(self._solver.due, Kind.RESULT, self._answered)

    def _answered(self) -> None:
        self._awaited = False
        if not self._stopped:
            self._consider()

    def _note(self, answer: Answer, before: Placement) -> None:
        self._log.decisions += 1
        if answer.action == "wait":
            self._log.waits += 1
            return
        assert self._mover.aimed is not None
        moves, load_LE = moves_from(answer.moves).shape[1], self._epochs.load_LE
        self._open = Rebalance(
            instance=self._name,
            decided=self._clock.now,
            action=answer.action,
            reason=answer.why,
            moves=moves,
            moved_bytes=moves * self._mover.slot_bytes,
            balancedness_before=balancedness(before, load_LE),
            balancedness_after=balancedness(self._mover.aimed, load_LE),
            balancedness_predicted=float(answer.balancedness or 0.0),
            outcome="done",
            why="",
            seconds=0.0,
        )
        if not self._mover.busy:
            self._close("done")

    def _ended(self, reason: str) -> None:
        """An attempt is over."""
        self._close("dropped" if reason else "done", reason)
        self._consider()

    def _close(self, outcome: Outcome, why: str = "") -> None:
        """Log how the decision that was on its way has ended, if there was one."""
        if self._open is not None:
            seconds = self._clock.now - self._open.decided
            closed = msgspec.structs.replace(self._open, outcome=outcome, why=why, seconds=seconds)
            self._log.rebalances.append(closed)
            self._open = None
