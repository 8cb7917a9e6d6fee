"""Prompt rows whose logprobs are wanted: each is run with its logits once, whatever happens meanwhile."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.engine import split
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import NO_SCORES, Scores, Sequence, make_sequence
from moe_runtime.scheduler.step import Scheduled, SchedulerLimits
from moe_runtime.scheduler.step_inputs import StepInputs
from moe_runtime.spec.requests import FinishReason, Request, SamplingParams
from tests.scheduler.fake_device import FakeDevice, Runner, expected_output

NOTHING_SCORED = Scores(np.zeros(0, np.float32), np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32))


class Scoring(FakeDevice):
    """Remembers what each scored row attended to, and the token it was asked about."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        super().__init__(num_blocks, block_tokens)
        self.scored: Counter[tuple[tuple[int, ...], int]] = Counter()

    def run(self, inputs: StepInputs) -> np.ndarray:
        samples = super().run(inputs)
        rows, tokens = inputs.score_rows_S.tolist(), inputs.score_tokens_S.tolist()
        assert rows == sorted(set(rows))
        assert not set(rows) & set(inputs.sample_rows_N.tolist())
        self.scored.update(
            (tuple(self.history(inputs, row)), token) for row, token in zip(rows, tokens, strict=True)
        )
        return samples


class Checked(Scheduler):
    """Its steps say whose the scored rows are."""

    def build(self, token_level: int, chunk_tokens: int | None = None) -> Scheduled:
        step = super().build(token_level, chunk_tokens)
        owners = [s for s, count in step.scored for _ in range(count)]
        positions = step.inputs.positions_T[step.inputs.score_rows_S].tolist()
        expected = [s.request.prompt[p + 1] for s, p in zip(owners, positions, strict=True)]
        assert step.inputs.score_tokens_S.tolist() == expected
        return step


def limits(**changes) -> SchedulerLimits:
    values = {
        "max_batch_tokens": 64,
        "max_sequences": 4,
        "chunk_tokens": 16,
        "block_tokens": 4,
        "num_blocks": 64,
        "max_positions": 200,
    }
    return SchedulerLimits(**{**values, **changes})


def ask(i: int, prompt: list[int], max_tokens: int = 3, *, scored: bool = True, **more) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=2 if scored else -1)
    return make_sequence(Request(id=i, prompt=prompt, sampling=params), (7,), **more)


def wanted(prompts: list[list[int]]) -> Counter[tuple[tuple[int, ...], int]]:
    return Counter((tuple(p[:i]), p[i]) for p in prompts for i in range(1, len(p)))


def rows_scored(sequence: Sequence) -> int:
    """Of a sequence that still waits for the token after its prompt; 0 of all others."""
    if sequence.request.sampling.prompt_logprobs < 0 or sequence.num_known > sequence.prompt_len:
        return 0
    return min(sequence.next_score, sequence.prompt_len - 1)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    depth=st.integers(0, 1),
    chunk=st.sampled_from([1, 5, 16]),
    blocks=st.sampled_from([11, 14, 60]),
    unit=st.sampled_from([4, 8]),
)
def test_every_row_is_scored_once(seed, depth, chunk, blocks, unit):
    """Prompts that begin alike, some of them found in the cache; preemption; other weights meanwhile."""
    rng = np.random.default_rng(seed)
    scheduler = Checked(limits(chunk_tokens=chunk, num_blocks=blocks, prefix_tokens=unit))
    device = Scoring(blocks, 4)
    runner = Runner(scheduler, depth, device)
    stem = rng.integers(0, 50, 12).tolist()
    scored: list[list[int]] = []
    again: list[list[int]] = []  # beginnings whose scores are of weights that are gone
    outputs: dict[int, list[int]] = {}
    for i in range(9):
        prompt = stem[: rng.integers(0, 13)] + rng.integers(0, 50, rng.integers(1, 10)).tolist()
        wants = bool(rng.random() < 0.6)
        max_tokens = int(rng.integers(0 if wants else 1, 14))
        scheduler.add(ask(i, prompt, max_tokens, scored=wants))
        outputs[i] = expected_output(prompt, max_tokens)
        scored += [prompt] if wants else []
        for _ in range(int(rng.integers(0, 6))):
            runner.step()
        if rng.random() < 0.15:
            runner._commit(0)
            again += [s.request.prompt[: rows_scored(s) + 1] for s in scheduler.by_request.values()]
            scheduler.forget_kv()
    runner.run()
    # What the runner keeps of those that wanted no token is the sample that told of their end.
    assert {i: out if outputs[i] else [] for i, out in runner.outputs.items()} == outputs
    assert device.scored == wanted(scored + again)
    assert scheduler.pool.num_free == blocks


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_preempted_halfway_goes_on_where_its_scores_end(depth):
    scheduler = Checked(limits(chunk_tokens=4, num_blocks=12))
    device = Scoring(12, 4)
    runner = Runner(scheduler, depth, device)
    first, second = list(range(1, 6)), list(range(10, 34))
    scheduler.add(ask(0, first, 20, scored=False))
    runner.step()
    runner.step()
    scheduler.add(ask(1, second, 2))
    for _ in range(4):
        runner.step()
    before = scheduler.by_request[1].next_score
    assert 4 <= before < len(second) - 1
    scheduler._preempt()
    assert scheduler.waiting.head.request.id == 1
    runner.run()
    assert runner.preemptions >= 1
    assert device.scored == wanted([second])
    assert runner.again < before, "the cache has what was scored"
    assert runner.outputs[1] == expected_output(second, 2)


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_scores_of_weights_that_are_gone_are_made_anew(preempted, steps):
    scheduler = Checked(limits(chunk_tokens=4))
    device = Scoring(64, 4)
    runner = Runner(scheduler, 0, device)
    prompt = list(range(1, 14))  # the last chunk has no row to score
    sequence = ask(0, prompt, 2)
    scheduler.add(sequence)
    for _ in range(steps):
        runner.step()
    sequence.scores.append(NOTHING_SCORED)
    if preempted:
        scheduler._preempt()
    device.scored.clear()
    scheduler.forget_kv()
    assert not sequence.scores
    runner.run()
    assert device.scored == wanted([prompt])
    device.scored.clear()
    scheduler.add(other := ask(1, prompt, 2))
    while other.num_known == len(prompt):
        runner.step()
    device.scored.clear()
    scheduler.forget_kv()
    runner.run()
    assert not device.scored, "the client has them already"


def test_the_cache_is_filled_but_not_read():
    scheduler = Checked(limits())
    device = Scoring(64, 4)
    runner = Runner(scheduler, 0, device)
    prompt = list(range(1, 18))
    for i, (scored, found) in enumerate([(True, 0), (False, 16), (True, 0), (False, 16)]):
        sequence = ask(i, prompt, 0 if i == 0 else 2, scored=scored)
        scheduler.add(sequence)
        runner.run()
        assert sequence.cached_tokens == found, i
        assert sequence.next_score == NO_SCORES
    assert device.scored == wanted([prompt, prompt])
    assert runner.reasons[0] == FinishReason.LENGTH


def test_a_prompt_without_tokens_to_follow_may_fill_all_positions_and_is_never_handed_over():
    scheduler = Checked(limits(max_positions=40, num_blocks=10))
    runner = Runner(scheduler, 0, Scoring(10, 4))
    scheduler.add(ask(0, [3] * 40, 0, handoff=True))
    runner.run()
    assert runner.reasons == {0: FinishReason.LENGTH}
    assert runner.handoffs == {}
    assert scheduler.pool.num_free == 10


def test_who_goes_on_with_a_prompt_scores_nothing_and_reads_the_cache():
    scheduler = Checked(limits(reuse_pulled=True))
    device = Scoring(64, 4)
    runner = Runner(scheduler, 0, device)
    prompt = list(range(1, 18))
    scheduler.add(ask(0, prompt, 1, scored=False))
    runner.run()
    sequence = ask(1, prompt, 3, first_token=9)
    scheduler.add(sequence)
    scheduler.propose()
    assert scheduler.take_started_pulls() == [sequence]
    assert sequence.kept_blocks == 4
    scheduler.pulled(sequence, ok=False)
    runner.run()
    assert not device.scored


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    at=st.integers(0, 64),
    chunk=st.integers(1, 64),
)
def test_cut_inputs_score_the_same_rows(lengths, at, chunk):
    scheduler = Checked(limits())
    for i, length in enumerate(lengths):
        scheduler.add(ask(i, [10 * i + j % 9 for j in range(length)], scored=i != 1))
    scheduler.propose()
    whole = scheduler.build(64, chunk).inputs
    at = min(at, whole.num_tokens)
    parts = (split.cut(whole, 0, at), split.cut(whole, at, whole.num_tokens))
    rows = np.concatenate([parts[0].score_rows_S, parts[1].score_rows_S + at])
    assert rows.tolist() == whole.score_rows_S.tolist()
    tokens = np.concatenate([p.score_tokens_S for p in parts])
    assert tokens.tolist() == whole.score_tokens_S.tolist()
    for part in parts:
        assert ((part.score_rows_S >= 0) & (part.score_rows_S < part.num_tokens)).all()
