"""Logprobs of prompts on their way from the steps to the client: once, whole, with what ends the prompt."""

import numpy as np
import pytest
import torch

from moe_runtime.engine.device_step import Samples
from moe_runtime.engine.extras import keep_scores
from moe_runtime.engine.messages import (
    Abort,
    Prefilled,
    PromptDone,
    PromptLogprobs,
    StepTokens,
    Submit,
)
from moe_runtime.spec.requests import Request, SamplingParams
from tests.engine.lone_desk import Rank, scores_of


def scored(i: int, max_tokens: int, length: int = 20) -> Request:
    """A prompt of two chunks of which the two best tokens are wanted at each place."""
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2)
    return Request(id=i, prompt=[9] * length, sampling=sampling)


EXPECTED = PromptLogprobs(
    2,
    (-np.arange(19, dtype=np.float32)).tobytes(),
    (np.arange(19, dtype=np.int32)[:, None] + np.arange(2, dtype=np.int32)).tobytes(),
    (-np.arange(19, dtype=np.float32)[:, None] - np.arange(2, dtype=np.float32)).tobytes(),
)


@pytest.mark.parametrize("deployment", ["unified", "prefill"])
def test_a_prompt_alone_ends_with_its_logprobs_and_no_token(deployment):
    rank = Rank(deployment)
    for number, length in ((1, 20), (2, 1)):
        rank.give(Submit(request=scored(number, 0, length), handoff=deployment == "prefill"))
        rank.step()
        rank.step()
        (message,) = rank.outbox.take(PromptDone)
        assert (message.request, message.instance) == (number, f"{deployment}-0")
        found = message.start.prompt_logprobs
        assert found == (EXPECTED if length > 1 else PromptLogprobs(0, b"", b"", b""))
    assert rank.outbox.take(StepTokens) + rank.outbox.take(Prefilled) == []
    assert rank.desk.tally.output_tokens == 0
    assert rank.at_baseline()


def test_logprobs_of_a_prompt_come_once_with_its_first_token():
    rank = Rank("unified")
    rank.give(Submit(request=scored(1, 4), handoff=False))
    for _ in range(7):
        rank.step()
    tokens = [t for m in rank.outbox.take(StepTokens) for t in m.tokens]
    assert [t.start and t.start.prompt_logprobs for t in tokens] == [EXPECTED, None, None, None]


def test_logprobs_of_a_prompt_come_with_its_handover():
    rank = Rank("prefill")
    rank.give(Submit(request=scored(1, 4), handoff=True))
    rank.step()
    assert rank.scheduler.by_request[1].scores, "the first chunk's are here"
    rank.step()
    (message,) = rank.outbox.take(Prefilled)
    assert message.start.prompt_logprobs == EXPECTED


@pytest.mark.parametrize("deployment", ["unified", "prefill"])
def test_a_prompt_that_is_aborted_half_scored_leaves_nothing(deployment):
    rank = Rank(deployment)
    rank.give(Submit(request=scored(1, 4), handoff=deployment == "prefill"))
    rank.step()
    sequence = rank.scheduler.by_request[1]
    before = len(sequence.scores)
    rank.scheduler.propose()
    step = rank.scheduler.build(100)  # in flight while the client hangs up
    rank.give(Abort(request=1))
    keep_scores(step, Samples(torch.zeros(len(step.sampled), dtype=torch.int64), scores=scores_of(step)))
    assert step.scored
    assert len(sequence.scores) == before
    assert rank.scheduler.commit(step, np.zeros(len(step.sampled), np.int32)) == []
    assert rank.outbox.take(StepTokens) + rank.outbox.take(PromptDone) == []
    assert rank.at_baseline()
