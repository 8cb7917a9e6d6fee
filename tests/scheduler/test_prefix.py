"""The prefix cache: what is found, what it is worth, what is given up first, and who may share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.scheduler.blocks import BlockPool
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import Sequence, make_sequence
from moe_runtime.spec.requests import Request, SamplingParams
from tests.scheduler.fake_device import Runner, expected_output
from tests.scheduler.test_scheduler import EOS, limits

BLOCK = 4


def ask(i: int, prompt: list[int], max_tokens: int = 3, *, salt: str = "", handoff: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = Request(id=i, prompt=prompt, sampling=params, cache_salt=salt)
    return make_sequence(request, (EOS,), handoff=handoff)


def serve(runner: Runner, i: int, prompt: list[int], **more) -> int:
    """Run one request alone; returns its cached tokens."""
    sequence = ask(i, prompt, **more)
    runner.scheduler.add(sequence)
    runner.run()
    return sequence.cached_tokens


def family_of_prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Prompts that branch off each other at random places."""
    prompts: list[list[int]] = [[]]
    while len(prompts) <= count:
        stem = prompts[rng.integers(len(prompts))]
        stem = stem[: rng.integers(len(stem) + 1)] if rng.random() < 0.5 else stem
        prompts.append((stem + rng.integers(0, 50, rng.integers(1, 16)).tolist())[:40])
    return prompts[1:]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    depth=st.integers(0, 1),
    unit=st.sampled_from([0, 8]),
    chunk=st.sampled_from([3, 16]),
    blocks=st.sampled_from([16, 24, 64]),
)
def test_outputs_are_those_without_a_cache_and_tokens_are_counted_once(seed, depth, unit, chunk, blocks):
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(
        limits(
            chunk_tokens=chunk, num_blocks=blocks, prefix_tokens=unit, max_sequences=int(rng.integers(1, 6))
        )
    )
    runner = Runner(scheduler, depth)
    wanted, sequences = {}, []
    for i, prompt in enumerate(family_of_prompts(rng, 12)):
        max_tokens = int(rng.integers(1, 16))
        sequences.append(ask(i, prompt, max_tokens))
        scheduler.add(sequences[-1])
        wanted[i] = expected_output(prompt, max_tokens)
        for _ in range(int(rng.integers(0, 12))):
            runner.step()
    runner.run()
    assert runner.outputs == wanted
    assert scheduler.pool.num_free == blocks
    prompt_tokens = sum(s.prompt_len for s in sequences)
    assert runner.fresh + runner.cached == prompt_tokens
    assert runner.cached == sum(s.cached_tokens for s in sequences)
    assert all(s.cached_tokens < s.prompt_len for s in sequences)


def test_a_repeated_prompt_is_found_but_for_its_last_token():
    runner = Runner(Scheduler(limits()), 0)
    prompt = list(range(1, 17))
    assert serve(runner, 0, prompt) == 0
    assert serve(runner, 1, prompt) == 12, "the whole of 16 tokens would leave nothing to sample from"
    assert serve(runner, 2, [*prompt, 9]) == 16
    assert serve(runner, 3, [*prompt[:7], 9]) == 4, "complete blocks only"
    assert serve(runner, 4, [9, *prompt[1:]]) == 0, "a block counts only with all before it"


def test_generated_tokens_are_found_by_the_next_turn():
    runner = Runner(Scheduler(limits()), 0)
    prompt = list(range(1, 9))
    serve(runner, 0, prompt, max_tokens=9)
    turn = [*prompt, *runner.outputs[0]]
    assert serve(runner, 1, [*turn, 30, 31]) == 16, "the last of the 17 tokens has no KV"


def test_units_of_several_blocks_are_found_whole():
    runner = Runner(Scheduler(limits(prefix_tokens=8)), 0)
    prompt = list(range(1, 31))
    serve(runner, 0, prompt, max_tokens=1)
    assert serve(runner, 1, prompt, max_tokens=1) == 24
    assert serve(runner, 2, prompt[:15], max_tokens=1) == 8


@pytest.mark.parametrize(("first", "second"), [("", "a"), ("a", "b"), ("a", "")])
def test_salts_keep_apart(first, second):
    runner = Runner(Scheduler(limits()), 0)
    prompt = list(range(1, 17))
    serve(runner, 0, prompt, salt=first)
    assert serve(runner, 1, prompt, salt=second) == 0
    assert serve(runner, 2, prompt, salt=first) == 12


def test_models_keep_apart_and_off_is_off():
    prompt = list(range(1, 17))
    keys = []
    for model in ("a", "b"):
        sequence = ask(0, prompt)
        scheduler = Scheduler(limits(model=model))
        scheduler.add(sequence)
        Runner(scheduler, 0).run()
        keys.append(set(sequence.block_keys))
    assert keys[0]
    assert not keys[0] & keys[1]
    runner = Runner(Scheduler(limits(prefix_cache=False)), 0)
    serve(runner, 0, prompt)
    assert serve(runner, 1, prompt) == 0
    assert runner.scheduler.pool.num_idle == 0


def test_running_sequences_share_blocks_and_give_them_up_one_by_one():
    scheduler = Scheduler(limits())
    runner = Runner(scheduler, 0)
    prompt = list(range(1, 17))
    scheduler.add(ask(0, prompt, 20))
    runner.step()
    alone = scheduler.pool.num_used
    scheduler.add(ask(1, prompt, 20))
    runner.step()
    assert scheduler.pool.num_holds - scheduler.pool.num_used == 3
    assert scheduler.pool.num_used == alone + 2, "its own last prompt block; the other's first of output"
    scheduler.abort(0)
    scheduler.check_invariants()
    runner.run()
    assert runner.outputs[1] == expected_output(prompt, 20)
    assert scheduler.pool.num_free == 64


def test_leases_share_blocks_too():
    runner = Runner(Scheduler(limits()), 0)
    scheduler = runner.scheduler
    prompt = list(range(1, 17))
    for i in range(3):
        scheduler.add(ask(i, prompt, 5, handoff=True))
        runner.run()
    assert scheduler.pool.num_used == 4 + 1 + 1
    assert len({int(blocks[-1]) for blocks in runner.handoffs.values()}) == 3, "each lease ends in its own"
    for i in (1, 0, 2):
        scheduler.pool.free(runner.handoffs.pop(i))
        scheduler.check_invariants(leased=sum(map(len, runner.handoffs.values())))
    assert scheduler.pool.num_free == 64


def test_the_longest_unused_goes_first_and_ends_before_beginnings():
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(3)
    for blocks, name in ((first, b"a"), (second, b"b")):
        for i, block in enumerate(blocks):
            pool.keep(int(block), name + bytes([i]))
    pool.free(first)
    pool.free(second)
    assert pool.take_stale() == [], "kept blocks are not poisoned"
    assert (pool.num_free, pool.num_idle) == (6, 6)
    assert pool.allocate(4).tolist() == [*first[::-1].tolist(), int(second[2])]
    assert pool.take_stale() == sorted([*first.tolist(), int(second[2])]), "evicted ones are"
    assert pool.find([b"a\0", b"a\1"]) == []
    assert pool.find([b"b\0", b"b\1", b"b\2"]) == second[:2].tolist()
    pool.check()


def test_an_equal_block_is_kept_once():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.keep(first, b"x")
    pool.keep(second, b"x")
    assert pool.find([b"x"]) == [first]
    pool.free([first, second])
    assert (pool.num_idle, pool.num_free) == (1, 2)


def test_preempted_sequences_find_what_they_had():
    """Recomputing costs little as long as nobody needed the blocks."""
    counts = []
    for cache in (True, False):
        scheduler = Scheduler(limits(num_blocks=15, prefix_cache=cache))
        runner = Runner(scheduler, 0)
        for i in range(3):
            scheduler.add(ask(i, [i + 1] * 8, 20))
        runner.run()
        assert runner.preemptions > 0
        counts.append(runner.again)
    assert counts[0] < counts[1]
