"""What fits, and which seeds follow from one."""

import pytest

from moe_runtime.frontend.openai.completions import CompletionRequest
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.openai.sampling import (
    ModelLimits,
    OutputWishes,
    check_prompt_ids,
    new_seed,
    sampling_params,
    seed_of,
)

# Prefill and decode apart: a rank that prefills caches less than one that decodes.
LIMITS = ModelLimits(vocab_size=50, longest=100, longest_prompt=40)


def wishes(max_tokens: int | None) -> OutputWishes:
    return OutputWishes(max_tokens=max_tokens, max_tokens_field="max_tokens", logprobs=-1, structure=None)


def request(**fields) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="x", **fields)


@pytest.mark.parametrize(("length", "fits"), [(1, True), (40, True), (41, False)])
def test_a_prompt_must_fit_where_it_is_computed(length, fits):
    if fits:
        check_prompt_ids([1] * length, "prompt", LIMITS)
        return
    with pytest.raises(ApiError, match="has 41 tokens, at most 40 are possible"):
        check_prompt_ids([1] * length, "prompt", LIMITS)


def test_a_prompt_leaves_room_for_a_token():
    unified = ModelLimits(vocab_size=50, longest=100, longest_prompt=100)
    check_prompt_ids([1] * 99, "prompt", unified)
    with pytest.raises(ApiError, match="at most 99"):
        check_prompt_ids([1] * 100, "prompt", unified)


@pytest.mark.parametrize(("asked", "given"), [(None, 70), (70, 70), (1, 1)])
def test_room_is_where_sequences_are_decoded(asked, given):
    params = sampling_params(request(), wishes(asked), prompt_tokens=30, limits=LIMITS, seed=1)
    assert params.max_tokens == given


def test_more_than_the_room_is_refused_not_cut():
    with pytest.raises(ApiError, match="max_tokens up to 70 would fit") as caught:
        sampling_params(request(), wishes(71), prompt_tokens=30, limits=LIMITS, seed=1)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


def test_seeds():
    assert new_seed(request(seed=5)) == 5
    assert 0 <= new_seed(request(seed=-(2**63))) < 2**63
    assert new_seed(request(seed=-1)) != new_seed(request(seed=1))
    assert new_seed(request()) != new_seed(request())
    seeds = [seed_of(2**63 - 1, i) for i in range(1000)]
    assert seeds[0] == 2**63 - 1
    assert len(set(seeds)) == 1000
    assert all(0 <= s < 2**63 for s in seeds)
