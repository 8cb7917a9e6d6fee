"""What of sampling depends on a sequence's history: penalties, early stops, masks, and who waits."""

import numpy as np
import pytest

from moe_runtime.scheduler.sampling import greedy, with_history
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import make_sequence
from moe_runtime.scheduler.step import SchedulerLimits
from moe_runtime.spec.requests import Request, SamplingParams


def sequence(prompt, output, eos=(2,), **params):
    sampling = SamplingParams(max_tokens=16, **params)
    s = make_sequence(Request(id=1, prompt=prompt, sampling=sampling), eos)
    for token in output:
        s.tokens[s.num_known] = token
        s.num_known += 1
    return s


def edits_of(s):
    e = with_history(greedy(1), [s]).edits
    return {t: (d, a) for t, d, a in zip(e.token.tolist(), e.divide.tolist(), e.add.tolist(), strict=True)}


def test_plain_sequences_have_no_edits():
    plain = greedy(2)
    assert with_history(plain, [sequence([5], []), sequence([5], [6])]) is plain


def test_presence_and_frequency_are_over_the_output():
    s = sequence([5, 7], [7, 8, 8], presence_penalty=0.5, frequency_penalty=0.25)
    assert edits_of(s) == {7: (1.0, -0.75), 8: (1.0, -1.0)}


def test_repetition_is_over_prompt_and_output():
    assert edits_of(sequence([5, 5], [8], repetition_penalty=2.0)) == {5: (2.0, 0.0), 8: (2.0, 0.0)}


def test_bias_and_penalty_of_one_token_are_one_edit():
    s = sequence([5], [8], presence_penalty=1.0, logit_bias={8: 3.0, 9: -100.0})
    assert edits_of(s) == {8: (1.0, 2.0), 9: (1.0, -100.0)}


def test_stops_are_forbidden_before_min_tokens():
    early = sequence([5], [8], min_tokens=2, stop_token_ids=[4])
    assert edits_of(early) == {2: (1.0, -np.inf), 4: (1.0, -np.inf), 8: (1.0, 0.0)}
    assert all(add > -np.inf for _, add in edits_of(sequence([5], [8, 9], min_tokens=2)).values())


def test_the_order_of_samples_is_kept():
    plain, biased = sequence([5], []), sequence([5], [], logit_bias={1: 1.0})
    edits = with_history(greedy(3), [biased, plain, biased]).edits
    assert edits.sample.tolist() == [0, 2]


class Alternating:
    """Allows tokens 6 and 7 in turns; notes what it was told."""

    def __init__(self):
        self.accepted = []

    def accept(self, token):
        self.accepted.append(token)

    def mask(self):
        return np.array([1 << (6 + len(self.accepted) % 2)], np.int32)


LIMITS = SchedulerLimits(
    max_batch_tokens=64, max_sequences=8, chunk_tokens=32, block_tokens=4, num_blocks=64, max_positions=128
)


@pytest.mark.parametrize("transferred", [False, True])
def test_a_constraint_sees_every_token_once(transferred):
    constraint = Alternating()
    request = Request(id=1, prompt=[5, 5], sampling=SamplingParams(max_tokens=4))
    first = 6 if transferred else None
    s = make_sequence(request, (), first_token=first, constraint=constraint)
    scheduler = Scheduler(LIMITS)
    scheduler.add(s)
    while scheduler.num_requests:
        scheduler.propose()
        for started in scheduler.take_started_pulls():
            scheduler.pulled(started, ok=True)
            scheduler.propose()
        scheduled = scheduler.build(64)
        mask = scheduled.inputs.sampling.masks.words
        assert mask.tolist() == [[1 << (6 + len(constraint.accepted) % 2)]]
        scheduler.commit(scheduled, np.array([6 + len(constraint.accepted) % 2], np.int32))
    assert constraint.accepted == [6, 7, 6, 7]


def test_rows_that_need_their_history_wait_for_the_sample_in_flight():
    """Pipeline depth 1: built before the last step is committed."""
    scheduler = Scheduler(LIMITS)
    for id, params in enumerate(
        [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, presence_penalty=1.0)]
    ):
        scheduler.add(make_sequence(Request(id=id, prompt=[5], sampling=params), ()))
    scheduler.propose()
    first = scheduler.build(64)
    assert [s.request.id for s in first.sampled] == [0, 1]
    scheduler.propose()
    second = scheduler.build(64)
    assert [s.request.id for s in second.sampled] == [0]
    scheduler.commit(first, np.array([9, 9], np.int32))
    scheduler.propose()
    third = scheduler.build(64)
    assert [s.request.id for s in third.sampled] == [0, 1]
    assert third.inputs.sampling.edits.token.tolist() == [9]
