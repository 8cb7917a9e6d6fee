"""Ranks: the schedulers of one instance, of which only those in which something changes are touched.

A rank whose batch does not change owes its steps: they are paid, all at once and exactly, when something
happens to it. Meanwhile its rows, contexts and blocks are counted in arrays [R]. Steps are numbered from 0.
Knows no time and no other instance.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.agree import StepDecision
from moe_runtime.scheduler.counted import CountedScheduler
from moe_runtime.scheduler.counted_rows import Counted, Flight
from moe_runtime.scheduler.sequences import Sequence, State
from moe_runtime.scheduler.step import SchedulerLimits, TokenEvent
from moe_runtime.virtual.cluster.requests import VirtualScheduler

I64 = NDArray[np.int64]
NEVER = 1 << 62


@dataclass(slots=True)
class Rank:
    """One rank. Its scheduler stands before step `paid`.

    plain   it owes its steps from `paid` on: all of them are the same
    flight  the newest step, if it is not settled: at depth 1
    fresh   sequences that have one token and run next
    crew    rows of the table whose needs of blocks are known
    """

    scheduler: CountedScheduler
    paid: int = 0
    plain: bool = False
    flight: Flight | None = None
    fresh: list[Sequence] = field(default_factory=list)
    crew: NDArray[np.intp] | None = None


class Ranks:
    """R ranks at pipeline depth `depth`. Without `lazy` every rank takes every turn, to the same effect.

    Arrays [R] of the turn at hand: first the proposed rows, then what the step runs.

    decode_R, context_R  decode rows, and the tokens they attend to
    prefill_R            prefill rows; `new_R` of them for the first time, `again_R` not
    pairs_R, prefix_R    as in StepShape
    cached_R, used_R     as in StepRun
    started              (rank, sequence) whose KV is to be fetched
    seconds              sequences that get their second token in this step
    """

    def __init__(self, limits: SchedulerLimits, count: int, *, depth: int, lazy: bool = True) -> None:
        self._ranks = [Rank(VirtualScheduler(limits, depth=depth)) for _ in range(count)]
        self._depth, self._lazy, self._size = depth, lazy, limits.block_tokens
        self._due_R: I64 = np.full(count, NEVER, np.int64)
        self._needs_BR: I64 = np.zeros((limits.block_tokens, count), np.int64)
        self._full: list[int] = []
        self.decode_R, self.prefill_R, self.context_R, self.used_R = _zeros(4, count)
        self._of_turn = _zeros(5, count)
        self.pairs_R, self.prefix_R, self.new_R, self.again_R, self.cached_R = self._of_turn
        (self._preemptions_R,) = _zeros(1, count)
        self.started: list[tuple[int, Sequence]] = []
        self.seconds: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def scheduler(self, rank: int) -> CountedScheduler:
        """To look at; it may owe steps."""
        return self._ranks[rank].scheduler

    # -- a turn, before step `step` -------------------------------------------------------------

    def touch(self, rank: int, step: int) -> CountedScheduler:
        """The rank's scheduler as it is before the step; it will be looked at in the next turn."""
        self._pay(rank, step)
        self._due_R[rank] = min(self._due_R[rank], step)
        return self._ranks[rank].scheduler

    def pulled(self, rank: int, step: int, sequence: Sequence, *, ok: bool) -> None:
        """The KV of a sequence is here, or will not come."""
        self.touch(rank, step).pulled(sequence, ok=ok)
        if ok and sequence.state is State.RUNNING:
            self._ranks[rank].fresh.append(sequence)

    def propose(self, step: int) -> None:
        """Ranks in which something may change say what they could run: `decode_R` and `prefill_R`."""
        self._full, self.started, self.seconds = [], [], []
        self._of_turn[:] = 0
        for rank in (self._due_R <= step).nonzero()[0].tolist() if self._lazy else range(len(self)):
            self._pay(rank, step)
            self._look(rank, step)

    def turns(self, step: int) -> int:
        """Steps from this one on in which the batch of no rank changes, at least 1."""
        if self._full or self.seconds or not self._lazy:
            return 1
        return int(min(self._due_R.min() - step, 1 << 30))

    def take(self, step: int, decision: StepDecision) -> list[tuple[int, TokenEvent]]:
        """Run the agreed step where it changes something, and settle what this turn settles: events by rank.

        That is this step's samples at depth 0, and those of the step before at depth 1. Nothing happens to a
        rank between its turns, so they are settled at once; they are known when their step ends.
        """
        events: list[tuple[int, TokenEvent]] = []
        for rank in self._full:
            r = self._ranks[rank]
            r.paid = step + 1
            if not self.decode_R[rank] and not self.prefill_R[rank]:
                assert r.flight is not None
                events += [(rank, event) for event in r.scheduler.settle(r.flight)]
                r.flight, r.scheduler.step = None, step + 1
                continue
            counted = r.scheduler.count(decision.token_level, decision.chunk_tokens)
            self._note(rank, counted)
            settled = r.flight if self._depth else counted.flight
            if settled is not None:
                events += [(rank, event) for event in r.scheduler.settle(settled)]
            r.flight = counted.flight if self._depth and len(counted.flight.rows) else None
        return events

    def flush(self) -> list[tuple[int, TokenEvent]]:
        """Settle what is in flight where no rank has anything to run: events by rank."""
        events: list[tuple[int, TokenEvent]] = []
        for rank in self._full:
            r = self._ranks[rank]
            if r.flight is not None:
                events += [(rank, event) for event in r.scheduler.settle(r.flight)]
                r.flight = None
        return events

    def finish(self, step: int) -> None:
        """The turn is over: ranks that run on as they are now need not be looked at before that ends."""
        for rank in self._full:
            r = self._ranks[rank]
            horizon = r.scheduler.horizon() if self._quiet(r) and not r.fresh else 0
            self._due_R[rank] = step
            if horizon:
                self._run_on(rank, step, horizon)

    def grow(self, step: int, turns: int) -> None:
        """The step and `turns` - 1 more of the same are run: contexts are longer, blocks are taken."""
        self.context_R += self.decode_R * turns
        whole, rest = divmod(turns, self._size)
        self.used_R += self._needs_BR[(step + np.arange(rest)) % self._size].sum(axis=0)
        if whole:
            self.used_R += whole * self._needs_BR.sum(axis=0)

    def known_tokens(self, rank: int, sequence: Sequence, done: int) -> int:
        """Tokens of a sequence that are settled once the first `done` steps are."""
        r = self._ranks[rank]
        ahead = max(0, r.paid - done)
        if sequence.row >= 0 and sequence.state is State.RUNNING:
            owed = done - r.paid if r.plain and not ahead else 0
            return int(r.scheduler.table.num_tokens[sequence.row]) + owed - ahead
        known = sequence.num_known
        return known - min(1, ahead) if sequence.state is State.FINISHED else known

    def take_preemptions(self) -> I64:
        """[R]: sequences preempted since the last call: some turns run nothing and are no step."""
        taken: I64 = self._preemptions_R.copy()
        self._preemptions_R[:] = 0
        return taken

    # -- inside -------------------------------------------------------------------------------

    def _pay(self, rank: int, step: int) -> None:
        """Take the steps that a rank owes. Its newest one is in flight at depth 1."""
        r = self._ranks[rank]
        if r.plain and step > r.paid:
            flight = r.scheduler.advance(step - r.paid)
            r.flight = flight if self._depth else None
        r.scheduler.step = step
        r.paid = step

    def _quiet(self, r: Rank) -> bool:
        """What is in flight has no news for anybody: decode rows have none, a prefill has."""
        return self._lazy and (r.flight is None or len(r.flight.rows) == r.flight.decode_rows)

    def _look(self, rank: int, step: int) -> None:
        """What a rank could run, and for how many steps that will stay so."""
        r = self._ranks[rank]
        scheduler, quiet = r.scheduler, self._quiet(r)
        horizon = scheduler.horizon() if quiet else 0
        if not horizon:
            work = scheduler.propose()
            self.decode_R[rank], self.prefill_R[rank] = work.decode_tokens, work.prefill_tokens
            self.started += [(rank, sequence) for sequence in scheduler.take_started_pulls()]
            self._preemptions_R[rank] += scheduler.take_preemptions()
            scheduler.take_admitted()
            horizon = scheduler.horizon() if quiet else 0
        self.seconds += [s for s in r.fresh if s.row >= 0 and s.state is State.RUNNING]
        r.fresh.clear()
        if horizon:
            self._run_on(rank, step, horizon)
            return
        r.plain, r.crew = False, None
        self.used_R[rank] = scheduler.pool.total - scheduler.pool.num_free
        self._needs_BR[:, rank] = 0
        _, self.context_R[rank] = scheduler.decode_load()
        if self.decode_R[rank] or self.prefill_R[rank] or r.flight is not None:
            self._full.append(rank)
        else:
            self._due_R[rank] = NEVER

    def _run_on(self, rank: int, step: int, horizon: int) -> None:
        """From this step on the rank owes its steps. What is in flight is settled with the first."""
        r = self._ranks[rank]
        r.plain = True
        rows, self.context_R[rank] = r.scheduler.decode_load()
        self.decode_R[rank], self.prefill_R[rank] = len(rows), 0
        if rows is not r.crew:
            # By number of step, so it stays true while the same rows run on.
            r.crew, at = rows, step % self._size
            needs_B = r.scheduler.block_needs()
            self._needs_BR[at:, rank] = needs_B[: self._size - at]
            self._needs_BR[:at, rank] = needs_B[self._size - at :]
        pool = r.scheduler.pool
        self.used_R[rank] = pool.total - pool.num_free - r.scheduler.blocks_taken()
        self._due_R[rank] = step + horizon

    def _note(self, rank: int, counted: Counted) -> None:
        """Put a step's numbers into the arrays; who has got a first token runs next."""
        self.context_R[rank] = counted.context
        self.prefill_R[rank] = counted.prefill_tokens + counted.recomputed_tokens
        self.new_R[rank], self.again_R[rank] = counted.prefill_tokens, counted.recomputed_tokens
        self.cached_R[rank] = counted.cached_tokens
        self.pairs_R[rank], self.prefix_R[rank] = counted.pairs, counted.prefix
        r = self._ranks[rank]
        table, pool = r.scheduler.table, r.scheduler.pool
        self.used_R[rank] = pool.total - pool.num_free
        for row in counted.flight.rows[counted.decode_rows :].tolist():
            sequence = table.sequences[row]
            assert sequence is not None
            first = table.num_tokens[row] == sequence.prompt_len + 1
            if first and sequence.request.sampling.max_tokens > 1 and not sequence.handoff:
                r.fresh.append(sequence)


def _zeros(arrays: int, count: int) -> I64:
    return np.zeros((arrays, count), np.int64)
