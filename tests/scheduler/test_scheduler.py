"""The scheduler against a fake device: outputs never depend on how work was cut into steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.errors import RequestRefused
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import make_sequence
from moe_runtime.scheduler.step import SchedulerLimits
from moe_runtime.spec.requests import Request, SamplingParams
from tests.scheduler.fake_device import FakeDevice, Runner, expected_output, next_token

EOS = 7


def limits(**changes) -> SchedulerLimits:
    values = {
        "max_batch_tokens": 64,
        "max_sequences": 8,
        "chunk_tokens": 16,
        "block_tokens": 4,
        "num_blocks": 64,
        "max_positions": 200,
    }
    return SchedulerLimits(**{**values, **changes})


def request(i: int, prompt: list[int], max_tokens: int, *, ignore_eos: bool = True) -> Request:
    return Request(id=i, prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))


def prompts(rng: np.random.Generator, count: int, longest: int) -> list[list[int]]:
    return [rng.integers(0, 50, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    count=st.integers(1, 12),
    depth=st.integers(0, 1),
    chunk=st.sampled_from([1, 3, 16, 64]),
    span=st.sampled_from([0, 1, 20]),
    sequences=st.sampled_from([1, 3, 8]),
    blocks=st.sampled_from([16, 20, 64]),
    ignore_eos=st.booleans(),
)
def test_outputs_do_not_depend_on_scheduling(seed, count, depth, chunk, span, sequences, blocks, ignore_eos):
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(
        limits(chunk_tokens=chunk, attention_span=span, max_sequences=sequences, num_blocks=blocks)
    )
    runner = Runner(scheduler, depth)
    wanted = {}
    for i, prompt in enumerate(prompts(rng, count, 40)):
        max_tokens = int(rng.integers(1, 20))
        scheduler.add(make_sequence(request(i, prompt, max_tokens, ignore_eos=ignore_eos), (EOS,)))
        wanted[i] = expected_output(prompt, max_tokens, None if ignore_eos else EOS)
        if rng.random() < 0.5:
            runner.step()
    runner.run()
    assert runner.outputs == wanted
    for i, tokens in wanted.items():
        assert runner.reasons[i] == ("stop" if tokens[-1] == EOS and not ignore_eos else "length")
    assert scheduler.pool.num_free == blocks
    assert scheduler.num_requests == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_happens_when_blocks_run_out_and_changes_nothing(depth):
    scheduler = Scheduler(limits(num_blocks=14))
    runner = Runner(scheduler, depth)
    rng = np.random.default_rng(3)
    wanted = {}
    for i in range(5):
        prompt = rng.integers(0, 50, 6).tolist()
        scheduler.add(make_sequence(request(i, prompt, 30), (EOS,)))
        wanted[i] = expected_output(prompt, 30)
    runner.run()
    assert runner.preemptions > 0
    assert runner.outputs == wanted


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), depth=st.integers(0, 1), blocks=st.sampled_from([16, 64]))
def test_abort_in_any_state_returns_everything(seed, depth, blocks):
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(limits(num_blocks=blocks))
    runner = Runner(scheduler, depth)
    texts = prompts(rng, 8, 40)
    for i, prompt in enumerate(texts):
        scheduler.add(make_sequence(request(i, prompt, 12), (EOS,)))
    aborted = set()
    for _ in range(200):
        if rng.random() < 0.3:
            victim = int(rng.integers(0, 8))
            if victim not in runner.reasons:
                aborted.add(victim)
            scheduler.abort(victim)
            scheduler.abort(victim)  # twice is a no-op
        if not runner.step():
            break
    assert scheduler.pool.num_free == blocks
    assert scheduler.num_requests == 0
    for i, prompt in enumerate(texts):
        whole = expected_output(prompt, 12)
        got = runner.outputs.get(i, [])
        assert got == whole[: len(got)]
        if i not in aborted:
            assert got == whole


@pytest.mark.parametrize("depth", [0, 1])
def test_handoff_moves_a_sequence_between_two_schedulers(depth):
    prefill = Runner(Scheduler(limits()), depth)
    decode = Runner(Scheduler(limits(num_blocks=24)), depth)
    rng = np.random.default_rng(5)
    texts = prompts(rng, 10, 30)
    for i, prompt in enumerate(texts):
        prefill.scheduler.add(make_sequence(request(i, prompt, 10), (EOS,), handoff=True))
    prefill.run()
    assert set(prefill.handoffs) == set(range(10))
    for i, prompt in enumerate(texts):
        (first,) = prefill.outputs[i]
        decode.scheduler.add(make_sequence(request(i, prompt, 10), (EOS,), first_token=first))
    refused_pull = 4
    for _ in range(2000):
        busy = decode.step()
        for sequence in decode.scheduler.take_started_pulls():
            busy = True
            i = sequence.request.id
            ok = i != refused_pull  # this one has to be recomputed
            if ok:
                _copy_kv(prefill.device, prefill.handoffs[i], decode, sequence)
            decode.scheduler.pulled(sequence, ok=ok)
            prefill.scheduler.pool.free(prefill.handoffs.pop(i).tolist())
        if not busy:
            break
    for i, prompt in enumerate(texts):
        assert prefill.outputs[i] + decode.outputs[i] == expected_output(prompt, 10)
    assert prefill.scheduler.pool.num_free == 64
    assert decode.scheduler.pool.num_free == 24


def _copy_kv(source: FakeDevice, blocks: np.ndarray, decode: Runner, sequence) -> None:
    history = source.read(blocks, sequence.prompt_len)
    table = decode.scheduler.table
    mine = table.blocks[sequence.row, : table.num_blocks[sequence.row]].astype(np.int64)
    slots = (mine[:, None] * 4 + np.arange(4)).reshape(-1)[: len(history)]
    decode.device.kv[slots] = history


def test_abort_while_kv_is_on_the_way_keeps_its_blocks_until_the_pull_ends():
    scheduler = Scheduler(limits())
    scheduler.add(make_sequence(request(0, [1, 2, 3], 5), (EOS,), first_token=9))
    assert scheduler.propose().decode_tokens == 0
    (sequence,) = scheduler.take_started_pulls()
    scheduler.abort(0)
    assert scheduler.pool.num_used > 0
    scheduler.pulled(sequence, ok=True)
    assert scheduler.pool.num_used == 0
    assert not Runner(scheduler, 0).step()


def test_level_bounds_prefill_but_never_decode():
    scheduler = Scheduler(limits())
    runner = Runner(scheduler, 0)
    for i in range(3):
        scheduler.add(make_sequence(request(i, [i + 1] * 3, 10), (EOS,)))
    runner.step()
    scheduler.add(make_sequence(request(9, [1] * 30, 2), (EOS,)))
    work = scheduler.propose()
    assert (work.decode_tokens, work.prefill_tokens) == (3, 30)
    scheduled = scheduler.build(token_level=5)
    assert scheduled.inputs.num_decode == 3
    assert scheduled.inputs.num_tokens == 5
    assert scheduled.prefill_tokens == 2


def test_a_sequence_counts_its_recomputed_tokens_apart():
    scheduler = Scheduler(limits(num_blocks=14))
    runner = Runner(scheduler, 0)
    fresh = again = 0
    for i in range(5):
        scheduler.add(make_sequence(request(i, [i + 1] * 6, 30), (EOS,)))
    for _ in range(500):
        work = scheduler.propose()
        if not (work.decode_tokens or work.prefill_tokens):
            break
        scheduled = scheduler.build(64)
        fresh += scheduled.prefill_tokens
        again += scheduled.recomputed_tokens
        runner.in_flight.append((scheduled, runner.device.run(scheduled.inputs)))
        runner._commit(0)
    assert fresh == 5 * 6
    assert again > 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "named"),
    [(0, 4, "at least 1"), (4, -1, "at least 1"), (190, 11, "200 positions"), (150, 50, "80 tokens")],
)
def test_requests_that_can_never_fit_are_refused(prompt, max_tokens, named):
    scheduler = Scheduler(limits(num_blocks=20))
    with pytest.raises(RequestRefused, match=named):
        scheduler.check(prompt, max_tokens)


def test_references_resolve_to_the_previous_sample():
    scheduler = Scheduler(limits())
    runner = Runner(scheduler, depth=1)
    scheduler.add(make_sequence(request(0, [3, 4], 4), (EOS,)))
    runner.step()
    scheduler.propose()
    scheduled = scheduler.build(64)
    assert scheduled.inputs.token_ids_T.tolist() == [-1]
    assert runner.device.previous.tolist() == [next_token([3, 4])]
