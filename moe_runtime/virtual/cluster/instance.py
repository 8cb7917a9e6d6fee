"""Instance: one EP group in virtual time. Its ranks take turns together, as engine.rank does: receive,
propose, agree, run, settle; park when nobody has work.

Owns when turns and steps happen. At depth 1 the turn of a step is held when the step before it begins, and
its samples are settled when it ends. What the samples mean to clients is the desk's to know.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from moe_runtime.engine.agree import NO_OFFER, MoveOrder, StepDecision, StepKind
from moe_runtime.scheduler.counted import CountedScheduler
from moe_runtime.scheduler.scheduler import TokenEvent
from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.virtual.cluster.agreement import Agreement
from moe_runtime.virtual.cluster.clock import Clock, Kind
from moe_runtime.virtual.cluster.events import Rebalance, Slowdown
from moe_runtime.virtual.cluster.moving import PAUSE, Moving
from moe_runtime.virtual.cluster.overlap import OverlapGain
from moe_runtime.virtual.cluster.ranks import Ranks
from moe_runtime.virtual.cluster.records import Listener, StepRun
from moe_runtime.virtual.cluster.times import StepTimes, lengthened, slowed
from moe_runtime.virtual.cost.shapes import StepCost, StepShape

Message = Callable[[int], None]


class Desk(Protocol):
    """Who hears what an instance has to say, at the moment it happens."""

    def fetch(self, instance: str, rank: int, sequence: Sequence) -> None:
        """The sequence has blocks: its KV may come."""
        ...

    def token(self, instance: str, rank: int, event: TokenEvent) -> None:
        """A sequence ended, left, or its prefill is complete."""
        ...

    def second_token(self, sequence: Sequence, time: float) -> None:
        """A sequence gets its second token at `time`."""
        ...


@dataclass(slots=True, kw_only=True)
class Instance:
    """`fast_forward` False: every step is a turn of every rank."""

    name: str
    ranks: Ranks
    agreement: Agreement
    depth: int
    times: StepTimes
    overlap: OverlapGain
    clock: Clock
    outside: Callable[[], float | None]
    listener: Listener
    desk: Desk
    fast_forward: bool = True
    failed: bool = False
    step: int = 0
    turns: int = 0
    _inbox: list[tuple[int, Message]] = field(default_factory=list)
    _parked: bool = True
    _ends: deque[float] = field(default_factory=lambda: deque((0.0, 0.0), maxlen=2))
    _unobserved: deque[tuple[float, StepDecision, float]] = field(default_factory=deque)
    _slowdowns: list[Slowdown] = field(default_factory=list)
    _rebalances: deque[Rebalance] = field(default_factory=deque)
    _moving: Moving | None = None

    # -- from outside -------------------------------------------------------------------------

    def post(self, rank: int, message: Callable[[CountedScheduler], None]) -> None:
        """Have a rank do something before its next step."""
        self.send(rank, lambda step: message(self.ranks.touch(rank, step)))

    def send(self, rank: int, message: Message) -> None:
        """As `post`, for who deals with `ranks` itself: it is told the step."""
        if self.failed:
            return
        if not self._parked:
            self._inbox.append((rank, message))
            return
        message(self.step)
        scheduler = self.ranks.scheduler(rank)
        if scheduler.waiting or scheduler.table.ready.any():
            self._turn_at(self.clock.now)

    def script(self, event: Slowdown | Rebalance) -> None:
        """A slowdown or a rebalance begins."""
        if isinstance(event, Slowdown):
            self._slowdowns.append(event)
            return
        self._rebalances.append(event)
        if self._parked and not self.failed:
            self._turn_at(self.clock.now)

    def fail(self) -> None:
        """Nothing happens here any more."""
        self.failed = True
        self._inbox.clear()

    def done_steps(self) -> tuple[int, float]:
        """Steps whose samples are out by now, and when the last of them ended (0 if none did)."""
        now, ended = self.clock.now, [end for end in self._ends if end <= self.clock.now]
        return self.step - sum(end > now for end in self._ends), max(ended, default=0.0)

    # -- turns --------------------------------------------------------------------------------

    def _turn_at(self, time: float) -> None:
        self._parked = False
        self.clock.at(time, Kind.TURN, self._turn)

    def _turn(self) -> None:
        if self.failed:
            return
        now, ranks = self.clock.now, self.ranks
        self.turns += 1
        for _, message in self._take_inbox():
            message(self.step)
        self._observe(now)
        ranks.propose(self.step)
        for rank, sequence in ranks.started:
            self.desk.fetch(self.name, rank, sequence)
        decision = self._agree(now)
        extra = self._move(decision.move, now)
        if decision.kind is StepKind.FORWARD:
            self._run(decision, extra)
        elif decision.kind is StepKind.FLUSH:
            self._deliver_at(self._ends[-1], ranks.flush())
            ranks.finish(self.step)
            self._turn_at(self._ends[-1])
        elif decision.move.moving:
            self._turn_at(now + PAUSE)
        else:
            self._parked = True
            for rank, message in self._take_inbox():
                self.send(rank, message)

    def _take_inbox(self) -> list[tuple[int, Message]]:
        inbox, self._inbox = self._inbox, []
        return inbox

    def _agree(self, now: float) -> StepDecision:
        if self._moving is None and self._rebalances:
            self._moving = Moving(self._rebalances.popleft())
        return self.agreement.decide(
            self.ranks,
            in_flight=int(self._ends[-1] > now),
            gain=self.overlap.microseconds(self.times, self.ranks),
            offer=self._moving.offer(now) if self._moving else NO_OFFER,
        )

    def _move(self, order: MoveOrder, now: float) -> float:
        """Follow the order about moving experts; seconds that the step takes longer for it."""
        moving = self._moving
        if moving is None or not moving.follow(order, now):
            return 0.0
        self.agreement.epoch += 1
        if moving.done:
            self._moving = None
            if moving.script.times is not None:
                self.times = moving.script.times
                self.overlap.forget()
        return moving.script.commit_seconds

    # -- a step -------------------------------------------------------------------------------

    def _run(self, decision: StepDecision, extra: float) -> None:
        """Run the agreed step, and as many of the same after it as nothing disturbs."""
        ranks, step, now = self.ranks, self.step, self.clock.now
        begin = max(now, self._ends[-1])
        events = ranks.take(step, decision)
        shape = StepShape(
            decode_sequences_R=ranks.decode_R.astype(np.float64),
            decode_context_R=ranks.context_R.astype(np.float64),
            prefill_tokens_R=ranks.prefill_R.astype(np.float64),
            prefill_pairs_R=ranks.pairs_R.astype(np.float64),
            prefill_prefix_R=ranks.prefix_R.astype(np.float64),
            mode=decision.dispatch_mode,
            micro_batches=2 if decision.micro_batches == 2 else 1,
        )
        factor = max([s.factor for s in self._slowdowns if s.start <= begin < s.end], default=1.0)
        alone = self.agreement.budget is not None or self._moving is not None or extra > 0
        turns = 1 if alone or not self.fast_forward else ranks.turns(step)
        turns, last, cost = self._stretch(shape, turns, begin, factor)
        if extra:
            cost = lengthened(cost, extra)
        end = begin + cost.seconds
        self._deliver_at(self._ends[-1] if self.depth else end, events)
        self.step += turns
        self._ends.append(begin + last if turns > 1 else self._ends[-1])
        self._ends.append(end)
        for sequence in ranks.seconds:
            self.desk.second_token(sequence, end)
        if self.agreement.budget is not None:
            self._unobserved.append((end, decision, cost.seconds))
        ranks.grow(step, turns)
        self._tell(decision, step, turns, begin, cost)
        ranks.finish(self.step)
        self._turn_at(begin + last if self.depth else end)

    def _stretch(
        self, shape: StepShape, turns: int, begin: float, factor: float
    ) -> tuple[int, float, StepCost]:
        """How many of `turns` steps begin before anything else happens; when the last does; their cost."""
        first = slowed(self.times.step(shape), factor)
        until = self.outside()
        if until is not None and turns > 1:
            # Contexts grow, so no step is shorter than the first.
            turns = min(turns, math.ceil((until - begin) / first.seconds))
        while turns > 1:
            cost, last = self.times.run(shape, turns)
            before = (cost.seconds - last.seconds) * factor
            if until is None or begin + before < until:
                return turns, before, slowed(cost, factor)
            turns -= 1
        return 1, 0.0, first

    def _tell(self, decision: StepDecision, step: int, turns: int, begin: float, cost: StepCost) -> None:
        ranks = self.ranks
        self.listener.steps(
            StepRun(
                instance=self.name,
                first_step=step,
                steps=turns,
                start=begin,
                seconds=cost.seconds,
                decision=decision,
                decode_R=ranks.decode_R.copy(),
                prefill_R=ranks.new_R.copy(),
                cached_R=ranks.cached_R.copy(),
                recomputed_R=ranks.again_R.copy(),
                preemptions_R=ranks.take_preemptions(),
                kv_used_R=ranks.used_R.copy(),
                cost=cost,
            )
        )

    def _deliver_at(self, time: float, events: list[tuple[int, TokenEvent]]) -> None:
        """Have the desk told at the time when the samples are out."""
        if events:
            self.clock.at(time, Kind.RESULT, partial(self._deliver, events))

    def _deliver(self, events: list[tuple[int, TokenEvent]]) -> None:
        if self.failed:
            return
        for rank, event in events:
            self.desk.token(self.name, rank, event)

    def _observe(self, now: float) -> None:
        """Let the budget learn from steps that have ended."""
        budget = self.agreement.budget
        while budget is not None and self._unobserved and self._unobserved[0][0] <= now:
            _, decision, seconds = self._unobserved.popleft()
            budget.observe(
                decode_rows=decision.decode_rows, prefill_rows=decision.prefill_rows, seconds=seconds
            )
