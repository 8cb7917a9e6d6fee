"""Instance: one EP group in virtual time. Its ranks take turns together, as engine.rank does: receive,
propose, agree, run, settle; park when nobody has work.

Owns when turns and steps happen. At depth 1 the turn of a step is held when the step before it begins, and
its samples are settled when it ends. What the samples mean to clients is the desk's to know.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moe_runtime.engine.agree import NO_OFFER, MoveOrder, StepDecision, StepKind
from moe_runtime.scheduler.counted import CountedScheduler
from moe_runtime.scheduler.step import TokenEvent
from moe_runtime.virtual.cluster.agreement import Agreement
from moe_runtime.virtual.cluster.balancing import Balancer
from moe_runtime.virtual.cluster.clock import Clock, Kind
from moe_runtime.virtual.cluster.events import Slowdown
from moe_runtime.virtual.cluster.moving import Moves, Moving
from moe_runtime.virtual.cluster.overlap import OverlapGain
from moe_runtime.virtual.cluster.ranks import Ranks
from moe_runtime.virtual.cluster.records import Desk, Listener, StepRun
from moe_runtime.virtual.cluster.times import StepTimes, lengthened, stretch
from moe_runtime.virtual.cost.shapes import StepCost, StepShape

Message = Callable[[int], None]


@dataclass(slots=True, kw_only=True)
class Instance:
    """`fast_forward` False: every step is a turn of every rank. `balancer` None: experts stay where they are.
    `life` counts restarts.
    """

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
    balancer: Balancer | None = None
    failed: bool = False
    life: int = 0
    step: int = 0
    turns: int = 0
    _inbox: list[tuple[int, Message]] = field(default_factory=list)
    _parked: bool = True
    _next_turn: int = 0
    _ends: deque[float] = field(default_factory=lambda: deque((0.0, 0.0), maxlen=2))
    _unobserved: deque[tuple[float, StepDecision, float]] = field(default_factory=deque)
    _slowdowns: list[Slowdown] = field(default_factory=list)
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

    def slow_down(self, event: Slowdown) -> None:
        """A slowdown begins."""
        self._slowdowns.append(event)

    def move(self, moves: Moves) -> None:
        """Experts go to other slots; none may be on the move."""
        assert self._moving is None
        self._moving = Moving(moves, self.clock.now + moves.timeout)
        self._wake()

    def give_up(self, reason: str) -> None:
        """Drop what is on the move, if anything is."""
        if self._moving is not None and not self._moving.failed:
            self._moving.failed = reason
            self._wake()

    def set_times(self, times: StepTimes) -> None:
        """Steps take something else from the next one on."""
        self.times = times
        self.overlap.forget()

    def fail(self) -> None:
        """Nothing happens here any more, unless it is started anew."""
        self.failed, self._moving = True, None
        self.life += 1
        self._inbox.clear()
        if self.balancer is not None:
            self.balancer.stop()

    def restart(self, ranks: Ranks, agreement: Agreement) -> None:
        """It serves again, with ranks that know nothing of the past; steps are numbered on."""
        self.ranks, self.agreement, self.failed = ranks, agreement, False
        self._parked, self._ends = True, deque((0.0, 0.0), maxlen=2)
        self._unobserved.clear()
        self.overlap.forget()

    @property
    def free_at(self) -> float:
        """When the last step ends that has begun; 0 if none has."""
        return self._ends[-1]

    def done_steps(self) -> tuple[int, float]:
        """Steps whose samples are out by now, and when the last of them ended (0 if none did)."""
        now, ended = self.clock.now, [end for end in self._ends if end <= self.clock.now]
        return self.step - sum(end > now for end in self._ends), max(ended, default=0.0)

    # -- turns --------------------------------------------------------------------------------

    def _turn_at(self, time: float, *, parked: bool = False) -> None:
        """The next turn is then; if the instance is parked, earlier where something wakes it."""
        self._parked = parked
        self._next_turn += 1
        self.clock.at(time, Kind.TURN, partial(self._turn, self._next_turn))

    def _wake(self) -> None:
        if self._parked and not self.failed:
            self._turn_at(self.clock.now)

    def _turn(self, number: int) -> None:
        if self.failed or number != self._next_turn:
            return
        now, ranks = self.clock.now, self.ranks
        self._parked = False
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
        else:
            self._parked = True
            if self._moving is not None:
                self._turn_at(self._moving.doze(now), parked=True)
            for rank, message in self._take_inbox():
                self.send(rank, message)

    def _take_inbox(self) -> list[tuple[int, Message]]:
        inbox, self._inbox = self._inbox, []
        return inbox

    def _agree(self, now: float) -> StepDecision:
        return self.agreement.decide(
            self.ranks,
            in_flight=int(self._ends[-1] > now),
            gain=self.overlap.microseconds(self.times, self.ranks),
            offer=self._moving.offer(now) if self._moving else NO_OFFER,
        )

    def _move(self, order: MoveOrder, now: float) -> float:
        """Follow the order about moving experts; seconds that the step takes longer for it."""
        moving = self._moving
        if moving is None:
            return 0.0
        if order.abort:
            self._moving = None
            moving.moves.dropped(moving.failed)
        if not moving.follow(order, now):
            return 0.0
        committed = moving.unit - 1
        self.agreement.epoch += 1
        if moving.done:
            self._moving = None
        times = moving.moves.committed(committed)
        if times is not None:
            self.set_times(times)
        return moving.moves.units[committed - 1].commit_seconds

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
            rounds=decision.rounds,
        )
        factor = max([s.factor for s in self._slowdowns if s.start <= begin < s.end], default=1.0)
        turns, until = self._alike(decision)
        turns, last, cost = stretch(self.times, shape, turns, until, begin=begin, factor=factor)
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

    def _alike(self, decision: StepDecision) -> tuple[int, float | None]:
        """Steps from this one on that may be the same one, if they begin before that time."""
        order, balancer = decision.move, self.balancer
        if self.agreement.budget is not None or order.begin or order.commit or order.abort:
            return 1, None
        if self._inbox or not self.fast_forward:
            return 1, None
        turns, until = self.ranks.turns(self.step), self.outside()
        if balancer is not None and turns > 1:
            turns = min(turns, balancer.steps_left(decision.rows))
        if self._moving is not None:
            most, before = self._moving.alike()
            turns, until = min(turns, most), before if until is None else min(until, before)
        return turns, until

    def _tell(self, decision: StepDecision, step: int, turns: int, begin: float, cost: StepCost) -> None:
        ranks = self.ranks
        run = StepRun(
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
        self.listener.steps(run)
        if self._moving is not None:
            self._moving.skip(turns - 1)
        if self.balancer is not None and self.balancer.count(run):
            self.clock.at(begin + cost.seconds, Kind.RESULT, partial(self._window_ended, self.life))

    def _window_ended(self, life: int) -> None:
        if life == self.life and self.balancer is not None:
            self.balancer.window_ended()

    def _deliver_at(self, time: float, events: list[tuple[int, TokenEvent]]) -> None:
        """Have the desk told at the time when the samples are out."""
        if events:
            self.clock.at(time, Kind.RESULT, partial(self._deliver, self.life, events))

    def _deliver(self, life: int, events: list[tuple[int, TokenEvent]]) -> None:
        if life != self.life:
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
