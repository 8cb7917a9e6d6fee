"""A CountedScheduler against a real one: the same state after every turn, whatever happens in between."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.scheduler.counted import CountedScheduler
from moe_runtime.scheduler.counted_rows import Flight
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import Sequence, make_sequence
from moe_runtime.scheduler.step import Scheduled, SchedulerLimits, TokenEvent
from moe_runtime.spec.requests import Request, SamplingParams


def limits(*, blocks: int, rows: int, prefix: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_tokens=24,
        max_sequences=rows,
        chunk_tokens=12,
        block_tokens=4,
        num_blocks=blocks,
        max_positions=64,
        prefix_cache=prefix > 0,
        prefix_tokens=prefix,
        reuse_pulled=prefix == 8,
    )


@dataclass
class Side:
    """A scheduler, the turns it is taken through and what ended."""

    scheduler: Scheduler
    depth: int
    ended: list[tuple[str, int, int]] = field(default_factory=list)
    pulling: dict[int, Sequence] = field(default_factory=dict)

    def note(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.kind != "token":
                self.ended.append((event.kind, event.sequence.request.id, event.sequence.num_known))
            if event.blocks is not None:
                self.scheduler.pool.free(event.blocks)


@dataclass
class Real(Side):
    """Turns of propose, build and commit of zeros."""

    flights: "deque[Scheduled]" = field(default_factory=deque)

    def turn(self) -> tuple[int, ...] | None:
        """What the turn ran, or None if there was nothing to run."""
        work = self.scheduler.propose()
        if not (work.decode_tokens or work.prefill_tokens):
            self._commit(0)
            return None
        step = self.scheduler.build(work.decode_tokens + 12, 12)
        self.flights.append(step)
        self._commit(self.depth)
        inputs = step.inputs
        attended = inputs.positions_T[inputs.num_decode :].astype(np.int64) + 1
        return (
            inputs.num_decode,
            int(inputs.decode_context_D.sum()),
            step.prefill_tokens,
            step.recomputed_tokens,
            step.cached_tokens,
            int(attended.sum()),
            int(inputs.segment_context_P.sum()),
        )

    def _commit(self, leave: int) -> None:
        while len(self.flights) > leave:
            step = self.flights.popleft()
            self.note(self.scheduler.commit(step, np.zeros(len(step.sampled), np.int32)))


@dataclass
class Virtual(Side):
    """The same turns, counted."""

    scheduler: CountedScheduler
    flights: "deque[Flight]" = field(default_factory=deque)

    def turn(self) -> tuple[int, ...] | None:
        work = self.scheduler.propose()
        if not (work.decode_tokens or work.prefill_tokens):
            self._commit(0)
            return None
        step = self.scheduler.count(work.decode_tokens + 12, 12)
        self.flights.append(step.flight)
        self._commit(self.depth)
        return (
            step.decode_rows,
            step.context,
            step.prefill_tokens,
            step.recomputed_tokens,
            step.cached_tokens,
            step.pairs,
            step.prefix,
        )

    def leap(self, turns: int) -> Flight:
        newest = self.scheduler.advance(turns)
        self.flights.clear()
        if self.depth:
            self.flights.append(newest)
        return newest

    def _commit(self, leave: int) -> None:
        while len(self.flights) > leave:
            self.note(self.scheduler.settle(self.flights.popleft()))


def state(scheduler: Scheduler) -> dict[str, object]:
    t, pool = scheduler.table, scheduler.pool
    rows = np.flatnonzero(t.stamp >= 0)
    known = scheduler.known_tokens if isinstance(scheduler, CountedScheduler) else lambda s: s.num_known
    return {
        "rows": rows.tolist(),
        "arrays": [a[rows].tolist() for a in (t.stamp, t.num_tokens, t.num_computed, t.num_blocks, t.ready)],
        "blocks": [t.blocks[row, : t.num_blocks[row]].tolist() for row in rows],
        "known": {i: known(s) for i, s in scheduler.by_request.items()},
        "scores": {i: s.next_score for i, s in scheduler.by_request.items()},
        "waiting": [(s.request.id, s.num_known, s.pending) for s in scheduler.waiting],
        "pool": (pool._blank, list(pool._idle), pool._key_of, pool._block_of, list(pool._holders)),
        "step": scheduler.step,
    }


def draw_sequence(rng: np.random.Generator, index: int) -> Sequence:
    """Prompts of few different tokens, outputs of zeros: prefixes are found, kept, evicted all the time."""
    prompt = [int(rng.integers(0, 2))] * int(rng.integers(1, 21))
    if rng.random() < 0.3:
        prompt += [int(t) for t in rng.integers(0, 3, rng.integers(1, 4))]
    kind = rng.choice(["here", "handoff", "transferred"])
    scored = rng.random() < 0.3
    sampling = SamplingParams(
        max_tokens=int(rng.integers(2 if kind == "transferred" else 0 if scored else 1, 30)),
        ignore_eos=True,
        prompt_logprobs=0 if scored else -1,
    )
    request = Request(id=index, prompt=prompt, sampling=sampling, priority=int(rng.integers(0, 2)))
    first = 0 if kind == "transferred" else None
    return make_sequence(request, (), handoff=kind == "handoff", first_token=first)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    depth=st.integers(0, 1),
    blocks=st.sampled_from([13, 20, 60]),
    rows=st.sampled_from([1, 3, 6]),
    prefix=st.sampled_from([0, 4, 8]),
    faults=st.booleans(),
)
def test_counted_turns_and_leaps_equal_real_turns(seed, depth, blocks, rows, prefix, faults):
    rng = np.random.default_rng(seed)
    numbers = limits(blocks=blocks, rows=rows, prefix=prefix)
    real = Real(Scheduler(numbers), depth)
    virtual = Virtual(CountedScheduler(numbers, depth=depth), depth)
    both: tuple[Side, ...] = (real, virtual)
    pulls: list[int] = []
    index = 0
    for _ in range(200):
        while index < 14 and rng.random() < 0.3:
            there = rng.bit_generator.state
            for side in both:
                rng.bit_generator.state = there
                sequence = draw_sequence(rng, index)
                side.scheduler.add(sequence)
            index += 1
        if faults and rng.random() < 0.05 and index:
            victim = int(rng.integers(0, index))
            for side in both:
                side.scheduler.abort(victim)
        for request in [p for p in pulls if rng.random() < 0.5]:
            pulls.remove(request)
            ok = not faults or bool(rng.random() < 0.7)
            for side in both:
                side.scheduler.pulled(side.pulling.pop(request), ok=ok)
        horizon = virtual.scheduler.horizon()
        if horizon and rng.random() < 0.8:
            turns = int(rng.integers(1, horizon + 1))
            ran = [one for _ in range(turns) if (one := real.turn()) is not None]
            rows, context = virtual.scheduler.decode_load()
            count = len(rows)
            needs_B, taken = virtual.scheduler.block_needs(), virtual.scheduler.blocks_taken()
            free = virtual.scheduler.pool.num_free
            assert virtual.leap(turns).decode_rows == count
            assert [r[0] for r in ran] == [count] * turns
            assert [r[1] for r in ran] == [context + count * j for j in range(turns)]
            needed = sum(int(needs_B[j % len(needs_B)]) for j in range(turns)) - taken
            assert free - virtual.scheduler.pool.num_free == needed
            assert all(r[2:] == (0, 0, 0, 0, 0) for r in ran)
        else:
            assert real.turn() == virtual.turn()
        started = []
        for side in both:
            started = [s.request.id for s in side.scheduler.take_started_pulls()]
            side.pulling.update({i: side.scheduler.by_request[i] for i in started})
            side.scheduler.check_invariants()
        pulls += started
        assert real.scheduler.take_preemptions() == virtual.scheduler.take_preemptions()
        assert real.ended == virtual.ended
        assert state(real.scheduler) == state(virtual.scheduler)
        if index == 14 and not real.scheduler.num_requests and not pulls:
            break
    else:
        pytest.fail("not done in 200 turns and leaps")
    assert real.scheduler.pool.num_free == blocks
