"""CountedScheduler: a Scheduler for virtual time. Pure.

It decides as a Scheduler does, since it is one; but its steps are numbers of rows instead of inputs for a
device, all samples are token 0 and end nothing before their number, and many steps in which nothing
changes but contexts are taken at once. What a Scheduler keeps in a running sequence is in arrays here:

    count(level) -> Counted     in the place of `build`
    settle(flight) -> events    in the place of `commit`
    horizon(), advance(k)       k turns of propose, count and settle at once

At depth 1 a turn settles the step before the one it counts, at depth 0 the same.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.counted_rows import Counted, CountedTable, Crew, Flight, Rows
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import Sequence, State
from moe_runtime.scheduler.step import SchedulerLimits, TokenEvent


class CountedScheduler(Scheduler):
    """`depth` is the plan's pipeline depth, 0 or 1."""

    table_type = CountedTable
    table: CountedTable
    finds_generated = True  # what is decoded may be the beginning of what waits

    def __init__(self, limits: SchedulerLimits, *, depth: int) -> None:
        super().__init__(limits)
        self.depth = depth
        rows = limits.max_sequences
        self._pending = np.zeros(rows, np.int32)
        self._length = np.zeros(rows, np.int32)
        self._keep_at = np.zeros(rows, np.int64)
        self._gone: dict[int, Sequence] = {}
        self._known_crew: Crew | None = None

    def pulled(self, sequence: Sequence, *, ok: bool) -> None:
        super().pulled(sequence, ok=ok)
        self.table.changed()

    def forget_kv(self) -> None:
        super().forget_kv()
        self.table.changed()

    # -- one step -----------------------------------------------------------------------------

    def count(self, token_level: int, chunk_tokens: int | None = None) -> Counted:
        """The same step as `build` would make, and the same state after it."""
        table, decode = self.table, self._decode
        chunks = self._chunks(token_level, chunk_tokens)
        self._take_scores(chunks)
        context = int(np.add.reduce(table.num_tokens[decode], dtype=np.int64))
        again = pairs = prefix = 0
        complete = []
        for row, count in chunks:
            begin = int(table.num_computed[row])
            again += self._recomputed(row, count)
            pairs += count * begin + count * (count + 1) // 2
            prefix += begin
            table.num_computed[row] = begin + count
            if begin + count == table.num_tokens[row]:
                complete.append(row)
        table.num_computed[decode] += 1
        rows = np.concatenate([decode, np.array(complete, np.intp)]) if complete else decode
        table.num_tokens[rows] += 1
        self._pending[rows] += 1
        table.changed()
        self._built(chunks)
        return Counted(
            decode_rows=len(decode),
            context=context,
            prefill_tokens=sum(count for _, count in chunks) - again,
            recomputed_tokens=again,
            cached_tokens=self._take_cached(),
            pairs=pairs,
            prefix=prefix,
            flight=Flight(len(decode), rows, table.stamp[rows]),
        )

    def settle(self, flight: Flight) -> list[TokenEvent]:
        """As `commit` of zeros, with the events of sequences that ended or whose prefill is complete only."""
        table, decoded, prefilled = self.table, flight.rows, flight.rows[flight.decode_rows :]
        here = table.stamp[flight.rows] == flight.stamps
        events = []
        if np.count_nonzero(here) < len(here):
            for stamp in flight.stamps[~here].tolist():
                events += self._settle_gone(self._gone.pop(stamp))
            decoded = decoded[here]
            prefilled = prefilled[here[flight.decode_rows :]]
        self._pending[decoded] -= 1
        if len(prefilled):
            decoded = decoded[: len(decoded) - len(prefilled)]
        known = table.num_tokens[decoded] - self._pending[decoded]
        ends = known == self._length[decoded]
        keeps = np.minimum(table.num_computed[decoded], known) >= self._keep_at[decoded]
        ending = {*decoded[ends].tolist(), *prefilled.tolist()}
        touched = decoded[ends | keeps]
        if len(touched) > 1:
            touched = table.in_order(touched)
        for index, row in enumerate([*touched.tolist(), *prefilled.tolist()]):
            sequence = table.sequences[row]
            assert sequence is not None
            self._keep(sequence)
            if row in ending:
                events.append(self._event(sequence, index, 0))
        return events

    # -- many steps at once ----------------------------------------------------------------------

    def horizon(self) -> int:
        """Turns that `advance` may take at once: decode only, nobody ends, no block runs out.

        0 when the next turn needs the whole of `propose`, `count` and `settle`: there is prefill, something
        waits and could be admitted, a sample ends its sequence, or there is nothing to run. To be asked
        where a turn begins.
        """
        crew = self._crew()
        count = len(crew.rows)
        if not count or self.table.num_ready != count or self._cached_tokens or self._may_admit():
            return 0
        # The turn that settles a sequence's last token ends it, so it is not one of these.
        turns = crew.until - (0 if self.depth else 1)
        return crew.affordable_turns(turns, self.pool.num_free, self.limits.block_tokens)

    def advance(self, steps: int) -> Flight:
        """Equal to `steps` >= 1 single turns; `steps` is at most `horizon()`. Returns the newest step.

        That one is still to be settled at depth 1; at depth 0 all are. A step that was counted before, and
        would have been settled in the first of these turns, is done with.
        """
        table, pool, crew = self.table, self.pool, self._crew()
        rows = crew.rows
        for _, kept, _, _, row, complete in self._pool_events(crew, steps):
            if kept:
                sequence = table.sequences[row]
                assert sequence is not None
                self._keep_complete(sequence, complete)
            else:
                table.add_block(row, pool.allocate_one())
        table.num_tokens[rows] += steps
        table.num_computed[rows] += steps
        self.step += steps
        if crew.kept_N is None:
            self._pending[rows] = self.depth
        self._grow(crew, steps)
        return Flight(len(rows), rows, table.stamp[rows])

    def decode_load(self) -> tuple[Rows, int]:
        """Rows that decode in the next turn, one object while they stay the same; tokens they attend to."""
        crew = self._crew()
        return crew.rows, crew.context

    def block_needs(self) -> NDArray[np.int64]:
        """int64 [block_tokens]: blocks taken by the turn after j others within a horizon, and so on around.

        It counts what `propose` has taken for the next turn already: see `blocks_taken`.
        """
        size = self.limits.block_tokens
        return np.bincount(self._crew().first_N % size, minlength=size)

    def blocks_taken(self) -> int:
        """How many of the blocks that the next turn needs are taken."""
        return int(np.count_nonzero(self._crew().first_N == self.limits.block_tokens))

    def known_tokens(self, sequence: Sequence) -> int:
        """Tokens of the sequence that are settled."""
        row = sequence.row
        if row < 0:
            return sequence.num_known
        return int(self.table.num_tokens[row] - self._pending[row])

    # -- inside -------------------------------------------------------------------------------

    def _crew(self) -> Crew:
        """Who decodes in the next turn."""
        table, size = self.table, self.limits.block_tokens
        rows, known = table.decode_rows(), self._known_crew
        if known is None or known.rows is not rows:
            known = self._known_crew = Crew.of(table, rows, size)
        return known

    def _grow(self, crew: Crew, steps: int) -> None:
        """The crew has taken `steps` turns and the blocks for them."""
        lagged = crew.kept_N is None
        crew.until -= steps
        crew.context += len(crew.rows) * steps
        crew.first_N = (crew.first_N - steps) % self.limits.block_tokens
        if not crew.until:
            self.table.changed()
        elif lagged:
            crew.kept_N = self._keep_at[crew.rows] - self.table.num_computed[crew.rows] - 1
        elif crew.kept_N is not None and self.prefix.enabled:
            crew.kept_N = (crew.kept_N - steps) % self.prefix.unit_tokens

    def _allocate_decode(self) -> None:
        crew = self._crew()
        if np.count_nonzero(crew.first_N) < len(crew.rows):  # some need a block now
            super()._allocate_decode()
            crew.first_N[crew.first_N == 0] = self.limits.block_tokens

    def _pool_events(self, crew: Crew, steps: int) -> list[tuple[int, ...]]:
        """What touches the pool in `steps` turns, in its order: (turn, kept?, urgency, arrival, row, tokens).

        In a turn blocks are given first, the most urgent row first; then complete units are kept. At depth 1
        a row that has nothing in flight settles its first sample a turn later than the others.
        """
        table, size, unit = self.table, self.limits.block_tokens, self.prefix.unit_tokens
        events: list[tuple[int, ...]] = []
        near = (crew.first_N < steps).nonzero()[0]
        short = crew.rows[near]
        urgency, arrival = table.urgency[short].tolist(), table.arrival[short].tolist()
        for row, u, a, turn in zip(
            short.tolist(), urgency, arrival, crew.first_N[near].tolist(), strict=True
        ):
            for t in range(turn, steps, size):
                events.append((t, False, u, a, row, 0))
        if not self.prefix.enabled:
            return sorted(events)
        near, lag_N = self._near_complete(crew, steps)
        full = crew.rows[near]
        urgency, arrival = table.urgency[full].tolist(), table.arrival[full].tolist()
        numbers = (self._keep_at[full].tolist(), table.num_computed[full].tolist(), lag_N.tolist())
        for row, u, a, keep_at, before, least in zip(full.tolist(), urgency, arrival, *numbers, strict=True):
            begin = before + 1
            for tokens in range(keep_at, begin + steps, unit):
                turn = max(tokens - begin, least)
                if turn < steps:
                    events.append((turn, True, u, a, row, begin + turn))
        return sorted(events)

    def _near_complete(self, crew: Crew, steps: int) -> tuple[Rows, NDArray[np.int32]]:
        """Places in the crew that complete a unit within `steps` turns; turns that each lags behind."""
        if crew.kept_N is not None:
            near = (crew.kept_N < steps).nonzero()[0]
            return near, np.zeros(len(near), np.int32)
        lag_N = (self._pending[crew.rows] == 0).astype(np.int32) * self.depth
        done_N = np.maximum(self._keep_at[crew.rows] - self.table.num_computed[crew.rows] - 1, lag_N)
        near = (done_N < steps).nonzero()[0]
        return near, lag_N[near]

    def _may_admit(self) -> bool:
        """Something waits, and that it stays so while nothing is freed is not certain."""
        if not self.waiting:
            return False
        head = self.waiting.head
        if head.pending:
            return True
        if self.table.num_running == len(self.table.stamp):
            return False
        finds = self._may_find(head)
        if finds and self.finds_generated:
            return True
        # Blocks of others' prompts are here already; some may go, which needs as many more.
        found = self.prefix.find(head) if finds else []
        need = self.blocks_for(head.num_known) - len(found)
        return self.pool.can_allocate(need + self.pool.count_idle(found) + self.table.num_running)

    def _settle_gone(self, sequence: Sequence) -> list[TokenEvent]:
        """A sample of a sequence that lost its row meanwhile."""
        sequence.pending -= 1
        if sequence.state is State.FINISHED:
            return []
        sequence.num_known += 1
        return [self._event(sequence, 0, 0)]

    def _enter(self, sequence: Sequence, row: int, blocks: NDArray[np.int32], computed: int) -> None:
        super()._enter(sequence, row, blocks, computed)
        self._pending[row] = 0
        self._length[row] = len(sequence.tokens)
        self._keep_at[row] = sequence.keep_at

    def _leave(self, row: int) -> NDArray[np.int32]:
        sequence = self.table.sequences[row]
        assert sequence is not None
        self._sync(sequence)
        if sequence.pending:
            self._gone[int(self.table.stamp[row])] = sequence
        return super()._leave(row)

    def _sync(self, sequence: Sequence) -> None:
        """Write back to a running sequence what its row says."""
        row = sequence.row
        sequence.pending = int(self._pending[row])
        sequence.num_known = int(self.table.num_tokens[row]) - sequence.pending

    def _keep(self, sequence: Sequence, computed: int | None = None) -> None:
        row = sequence.row
        self._sync(sequence)
        super()._keep(sequence, computed)
        self._keep_at[row] = sequence.keep_at

    def _keep_complete(self, sequence: Sequence, complete: int) -> None:
        """As `_keep` within `advance`: `complete` tokens have KV and are known."""
        row = sequence.row
        sequence.num_known = complete
        self.prefix.keep(sequence, self.table.blocks[row], complete)
        self._keep_at[row] = sequence.keep_at
