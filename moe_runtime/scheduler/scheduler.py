"""Scheduler: one rank's continuous batching, at step granularity. Pure: no torch, no clock.

    propose() -> Work            allocate for decode (preempting if it must), admit waiting requests
    build(level) -> Scheduled    the rows of the agreed step
    commit(scheduled, tokens)    sampled tokens in, events out

Between `build` and `commit` of one step another may be proposed and built (pipeline depth 1):
the newest token of a sequence is then a reference into the samples of the previous step.

Who goes first, for a row, for prefill rows of a step, and last to be preempted: the most urgent
(`queue`). So the most urgent sequence always makes progress, and every sequence becomes that one.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.errors import RequestRefused
from moe_runtime.scheduler.blocks import BlockPool
from moe_runtime.scheduler.budget import affordable_rows, row_cost
from moe_runtime.scheduler.prefix import PrefixCache
from moe_runtime.scheduler.queue import WaitingQueue, order
from moe_runtime.scheduler.rows import RowBuilder
from moe_runtime.scheduler.sequences import Sequence, SequenceTable, State
from moe_runtime.scheduler.step import Scheduled, SchedulerLimits, TokenEvent, Work
from moe_runtime.spec.requests import FinishReason


class Scheduler:
    """Owns the waiting queue, the table of running sequences and the block pool of one rank."""

    table_type = SequenceTable
    prefix_type = PrefixCache

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        longest = min(limits.max_positions, limits.num_blocks * limits.block_tokens)
        self.table = self.table_type(limits.max_sequences, self.blocks_for(longest))
        self.rows = RowBuilder(self.table, limits.block_tokens)
        self.prefix = self.prefix_type(
            self.pool,
            block_tokens=limits.block_tokens,
            unit_tokens=limits.prefix_tokens or limits.block_tokens,
            model=limits.model,
            enabled=limits.prefix_cache,
        )
        self.waiting = WaitingQueue()
        self.step = 0
        self._admitted: list[Sequence] = []
        self._cached_tokens = 0
        self._started_pulls: list[Sequence] = []
        self.by_request: dict[int, Sequence] = {}
        self._preemptions = 0
        self._decode: NDArray[np.intp] = np.zeros(0, np.intp)

    # -- requests -----------------------------------------------------------------------------

    def check(self, prompt_len: int, max_tokens: int, *, handoff: bool = False) -> None:
        """Raise RequestRefused for a request that this rank could never finish.

        With `handoff` only the prompt has to fit here: the rest is generated elsewhere.
        """
        total = prompt_len + max_tokens
        if prompt_len < 1 or max_tokens < 0:
            raise RequestRefused(
                f"prompt of {prompt_len} tokens, max_tokens {max_tokens}: must be at least 1 and 0"
            )
        if total > self.limits.max_positions:
            raise RequestRefused(
                f"prompt {prompt_len} + max_tokens {max_tokens} exceed the model's "
                f"{self.limits.max_positions} positions"
            )
        if self.blocks_for(prompt_len if handoff else total) > self.limits.num_blocks:
            room = self.limits.num_blocks * self.limits.block_tokens
            raise RequestRefused(
                f"prompt {prompt_len}{'' if handoff else f' + max_tokens {max_tokens}'} exceed "
                f"the {room} tokens of kv_cache.blocks"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises RequestRefused for one that can never fit."""
        max_tokens = sequence.request.sampling.max_tokens
        self.check(sequence.prompt_len, max_tokens, handoff=sequence.handoff)
        assert sequence.request.id not in self.by_request, f"request {sequence.request.id} is already here"
        self.by_request[sequence.request.id] = sequence
        self.waiting.arrive(sequence, self.step)

    def abort(self, request_id: int) -> Sequence | None:
        """Drop a request in any state; unknown ids are ignored (it may have just finished)."""
        sequence = self.by_request.get(request_id)
        if sequence is None:
            return None
        pulling = sequence.state is State.PULLING
        self._end(sequence, keep_row=pulling)
        return sequence

    def pulled(self, sequence: Sequence, *, ok: bool) -> None:
        """The KV of a transferred sequence arrived (`ok`), or must be recomputed here."""
        if sequence.state is State.FINISHED:  # aborted while its KV was on the way
            self.pool.free(self._leave(sequence.row))
            return
        sequence.state = State.RUNNING
        self.table.set_ready(sequence.row)
        if ok and not sequence.outdated:
            self._keep(sequence)
        else:
            # What was found is shared, so it is not written again.
            found = 0 if sequence.outdated else sequence.kept_blocks
            self.table.num_computed[sequence.row] = found * self.limits.block_tokens

    def forget_kv(self) -> None:
        """The weights change: running sequences begin anew with the tokens they have, and no prefix is found.

        Prompts that are half scored are scored anew, so that all their scores are of one model. Nothing is
        in flight. What was proposed is not built: the next call is `propose`.
        """
        for sequence in list(self.table.sequences):
            if sequence is None:
                continue
            if self.table.ready[sequence.row]:
                self._send_back(sequence)
            elif sequence.kept_blocks:
                self.prefix.admitted(sequence, 0)
                sequence.outdated = True
        for sequence in self.by_request.values():
            sequence.score_anew()
        self.pool.forget()
        self._decode = self._decode[:0]

    def take_started_pulls(self) -> list[Sequence]:
        """Transferred sequences admitted since the last call: their blocks wait for KV."""
        started, self._started_pulls = self._started_pulls, []
        return started

    def take_admitted(self) -> list[Sequence]:
        """Sequences that got a row for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.limits.block_tokens)

    @property
    def num_requests(self) -> int:
        return len(self.by_request)

    # -- one step -----------------------------------------------------------------------------

    def propose(self) -> Work:
        """Make every decode row runnable and admit what fits; LOCAL."""
        self._allocate_decode()
        prefill = self._behind()
        while prefill < self.limits.chunk_tokens and self._admit():
            prefill = self._behind()
        # All but the newest token of an admitted sequence may have been found: then it decodes at once.
        self._decode = self.table.decode_rows()
        if self.limits.attention_span:
            level = len(self._decode) + self.limits.chunk_tokens
            prefill = sum(count for _, count in self._chunks(level, None))
        return Work(decode_tokens=len(self._decode), prefill_tokens=prefill)

    def build(self, token_level: int, chunk_tokens: int | None = None) -> Scheduled:
        """The rows of the step: all decode tokens, then prefill up to `token_level`.

        `chunk_tokens` bounds the prefill, the limits' own if None.
        """
        chunks = self._chunks(token_level, chunk_tokens)
        again = sum(self._recomputed(row, count) for row, count in chunks)
        scores = self._take_scores(chunks)
        inputs, sample_rows = self.rows.build(
            self.table.in_order(self._decode), chunks, [rows for _, rows in scores]
        )
        sampled = []
        for index, row in enumerate(sample_rows):
            sequence = self.table.sequences[row]
            assert sequence is not None
            sequence.pending += 1
            self.table.num_tokens[row] += 1
            self.table.last_sample[row] = index
            sampled.append(sequence)
        self._built(chunks)
        cached = self._take_cached()
        return Scheduled(
            inputs=inputs,
            sampled=tuple(sampled),
            prefill_tokens=sum(count for _, count in chunks) - again,
            recomputed_tokens=again,
            cached_tokens=cached,
            scored=tuple((sequence, len(rows)) for sequence, rows in scores if rows),
        )

    def commit(self, scheduled: Scheduled, tokens_N: NDArray[np.int32]) -> list[TokenEvent]:
        """Sampled tokens of a step, in the order of `scheduled.sampled`.

        Tokens of sequences that ended meanwhile are discarded.
        """
        events = []
        for index, (sequence, token) in enumerate(zip(scheduled.sampled, tokens_N.tolist(), strict=True)):
            sequence.pending -= 1
            if sequence.state is State.FINISHED:
                continue
            sequence.tokens[sequence.num_known] = token
            sequence.num_known += 1
            if sequence.constraint is not None:
                sequence.constraint.accept(token)
            if sequence.row >= 0:
                self.table.last_token[sequence.row] = token
                if sequence.pending == 0:
                    self.table.last_sample[sequence.row] = -1
                self._keep(sequence)
            events.append(self._event(sequence, index, token))
        return events

    def take_preemptions(self) -> int:
        """Preemptions since the last call."""
        count, self._preemptions = self._preemptions, 0
        return count

    def check_invariants(self, *, leased: int = 0) -> None:
        """Assert that every hold of a block is a row's, or one of the caller's `leased` blocks'."""
        self.pool.check()
        owned = int(self.table.num_blocks.sum())
        assert owned + leased == self.pool.num_holds, (owned, leased, self.pool.num_holds)

    # -- inside -------------------------------------------------------------------------------

    def _event(self, sequence: Sequence, sample: int, token: int) -> TokenEvent:
        if not sequence.request.sampling.max_tokens:
            self._end(sequence)
            ended = FinishReason.LENGTH
            return TokenEvent(
                sequence=sequence, sample=sample, token=token, kind="prompt", finish_reason=ended
            )
        reason = None
        if token in sequence.stop_tokens:
            reason = FinishReason.STOP
        elif sequence.num_known == len(sequence.tokens):
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence)
            return TokenEvent(
                sequence=sequence, sample=sample, token=token, kind="finished", finish_reason=reason
            )
        if sequence.handoff:
            blocks = self._leave(sequence.row)
            self._forget(sequence)
            return TokenEvent(sequence=sequence, sample=sample, token=token, kind="handoff", blocks=blocks)
        return TokenEvent(sequence=sequence, sample=sample, token=token, kind="token")

    def _end(self, sequence: Sequence, *, keep_row: bool = False) -> None:
        if sequence.row >= 0 and not keep_row:
            self.pool.free(self._leave(sequence.row))
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        sequence.state = State.FINISHED
        del self.by_request[sequence.request.id]

    def _recomputed(self, row: int, count: int) -> int:
        """How many of the next `count` rows are not prompt tokens run for the first time; moves the mark."""
        sequence = self.table.sequences[row]
        assert sequence is not None
        begin = int(self.table.num_computed[row])
        end = begin + count
        first_time = max(0, min(end, sequence.prompt_len) - max(begin, sequence.high_water))
        sequence.high_water = max(sequence.high_water, end)
        return count - first_time

    def _take_scores(self, chunks: list[tuple[int, int]]) -> list[tuple[Sequence, range]]:
        """Of each chunk, about to be run: its sequence, and the positions whose logprobs are wanted."""
        scores = []
        for row, count in chunks:
            sequence, begin = self.table.sequences[row], int(self.table.num_computed[row])
            assert sequence is not None
            scores.append((sequence, sequence.take_scores(begin, begin + count)))
        return scores

    def _chunks(self, token_level: int, chunk_tokens: int | None) -> list[tuple[int, int]]:
        """(row, tokens) of the prefill of a step, the most urgent first."""
        chunk = self.limits.chunk_tokens if chunk_tokens is None else chunk_tokens
        room = max(0, min(chunk, token_level - len(self._decode)))
        chunks: list[tuple[int, int]] = []
        if not room:
            return chunks
        budget, span = float(room), self.limits.attention_span
        for row in self.table.in_order(self.table.prefill_rows()).tolist():
            computed = int(self.table.num_computed[row])
            # The first one gets on, however long its context.
            fits = max(affordable_rows(budget, computed, span), not chunks)
            count = min(room, fits, int(self.table.num_tokens[row]) - computed)
            if count == 0:
                break
            chunks.append((row, count))
            room -= count
            budget = max(0.0, budget - row_cost(count, computed, span))
        return chunks

    def _built(self, chunks: list[tuple[int, int]]) -> None:
        """A step is built: its chunks' blocks are as good as written, and the next step begins."""
        for row, _ in chunks:
            sequence = self.table.sequences[row]
            assert sequence is not None
            self._keep(sequence)
        self.step += 1
        self._decode = self._decode[:0]

    def _take_cached(self) -> int:
        cached, self._cached_tokens = self._cached_tokens, 0
        return cached

    def _behind(self) -> int:
        rows = self.table.prefill_rows()
        return int((self.table.num_tokens[rows] - self.table.num_computed[rows]).sum()) if len(rows) else 0

    def _allocate_decode(self) -> None:
        """Give every decode row room for its next token, preempting the least urgent sequences."""
        table = self.table
        rows = table.decode_rows()
        short = rows[table.num_tokens[rows] > table.num_blocks[rows] * self.limits.block_tokens]
        if not len(short):
            return
        for row in table.in_order(short).tolist():
            if table.stamp[row] < 0:
                continue  # preempted by a more urgent row just now
            while table.num_tokens[row] > table.num_blocks[row] * self.limits.block_tokens:
                if self.pool.can_allocate(1):
                    table.add_block(row, self.pool.allocate_one())
                elif self._preempt() == row:
                    break

    def _preempt(self) -> int:
        """Send the least urgent running sequence back to the queue; returns its row."""
        ready = [s for s in self.table.sequences if s is not None and self.table.ready[s.row]]
        assert ready, "no sequence to preempt: admission let one in that cannot fit"
        sequence = max(ready, key=order)
        row = sequence.row
        self._send_back(sequence)
        return row

    def _send_back(self, sequence: Sequence) -> None:
        """A running sequence waits again, without its KV."""
        row = sequence.row
        sequence.high_water = max(sequence.high_water, int(self.table.num_computed[row]))
        self.pool.free(self._leave(row))
        sequence.state = State.WAITING
        sequence.transferred = False  # its KV is recomputed here
        sequence.preemptions += 1
        self._preemptions += 1
        self.waiting.put_back(sequence)

    def _admit(self) -> bool:
        """Admit the head of the queue if a row and blocks for all its tokens are free."""
        if not self.waiting or self.waiting.head.pending:
            return False
        row = self.table.free_row()
        sequence = self.waiting.head
        found = self.prefix.find(sequence) if self._may_find(sequence) else []
        need = self.blocks_for(sequence.num_known) - len(found)
        # One spare block per running sequence, so that admission does not cause preemption at once.
        room = need + self.pool.count_idle(found) + self.table.num_running
        if row < 0 or not self.pool.can_allocate(room):
            return False
        self.waiting.remove(sequence)
        self.pool.share(found)
        blocks = self.pool.allocate(need)
        if found:
            blocks = np.concatenate([np.array(found, np.int32), blocks])
        self.prefix.admitted(sequence, len(found))
        if not sequence.preemptions:
            self._admitted.append(sequence)
        if sequence.transferred:
            sequence.state = State.PULLING
            computed = sequence.num_known - 1
            self._started_pulls.append(sequence)
        else:
            sequence.state = State.RUNNING
            computed = len(found) * self.limits.block_tokens
            self._count_cached(sequence, computed)
        self._enter(sequence, row, blocks, computed)
        return True

    def _may_find(self, sequence: Sequence) -> bool:
        return not sequence.transferred or self.limits.reuse_pulled

    def _enter(self, sequence: Sequence, row: int, blocks: NDArray[np.int32], computed: int) -> None:
        """Give the sequence a row; `_leave` takes it away again and returns its blocks."""
        self.table.enter(sequence, row, blocks, computed)

    def _leave(self, row: int) -> NDArray[np.int32]:
        return self.table.leave(row)

    def _count_cached(self, sequence: Sequence, computed: int) -> None:
        """Prompt tokens found in the cache count once, unless they were computed here or elsewhere before."""
        fresh = max(0, min(computed, sequence.prompt_len) - sequence.high_water)
        sequence.cached_tokens += fresh
        self._cached_tokens += fresh
        sequence.high_water = max(sequence.high_water, computed)

    def _keep(self, sequence: Sequence, computed: int | None = None) -> None:
        """Let others find the sequence's complete blocks; `computed` tokens of it have KV."""
        row = sequence.row
        tokens = int(self.table.num_computed[row]) if computed is None else computed
        self.prefix.keep(sequence, self.table.blocks[row], tokens)
