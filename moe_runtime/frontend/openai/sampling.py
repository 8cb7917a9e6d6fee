"""From a request's fields to SamplingParams: defaults, and what depends on the model.

Nothing is adjusted: a max_tokens that does not fit is an error, not a smaller one.
"""

import secrets
from dataclasses import dataclass

from moe_runtime.frontend.openai.errors import ApiError, invalid
from moe_runtime.frontend.openai.schema import SamplingFields
from moe_runtime.spec.requests import SamplingParams, Structure

_SEED_BITS = 63
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the model and its ranks can hold, in tokens.

    longest         prompt and output together, where sequences are decoded
    longest_prompt  where prompts are computed
    """

    vocab_size: int
    longest: int
    longest_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWishes:
    """What an endpoint adds to the common fields.

    max_tokens  None: as many as fit
    logprobs    alternatives to each token, -1 for no log probabilities
    scored      logprobs of the prompt's tokens too
    """

    max_tokens: int | None
    max_tokens_field: str
    logprobs: int
    structure: Structure | None
    scored: bool = False


def check_ids(request: SamplingFields, limits: ModelLimits) -> None:
    """ApiError 400 for token ids outside of the vocabulary."""
    end = limits.vocab_size
    for i, token in enumerate(request.stop_token_ids or ()):
        if token >= end:
            invalid(f"stop_token_ids[{i}]", f"is {token}, the vocabulary ends at {end - 1}")
    for key in request.logit_bias or {}:
        if int(key) >= end:
            invalid(f"logit_bias.{key}", f"the vocabulary ends at {end - 1}")


def check_prompt_ids(ids: list[int], where: str, limits: ModelLimits, *, least_output: int = 1) -> None:
    """ApiError 400 for a prompt without tokens, with unknown ones, or with too many for the least output."""
    if not ids:
        invalid(where, "has no tokens", code="empty_prompt")
    largest = max(ids)
    if largest >= limits.vocab_size:
        invalid(where, f"has token {largest}, the vocabulary ends at {limits.vocab_size - 1}")
    most = min(limits.longest_prompt, limits.longest - least_output)
    if len(ids) > most:
        invalid(where, f"has {len(ids)} tokens, at most {most} are possible", code="context_length_exceeded")


def new_seed(request: SamplingFields) -> int:
    """The request's seed, or a random one, as a number of 63 bits."""
    if request.seed is None:
        return secrets.randbits(_SEED_BITS)
    return request.seed % (1 << _SEED_BITS)


def seed_of(seed: int, choice: int) -> int:
    """The seed of the choice-th output for one prompt: the given one, then others that follow from it."""
    return (seed + choice * _GOLDEN) % (1 << _SEED_BITS)


def sampling_params(
    request: SamplingFields, wishes: OutputWishes, *, prompt_tokens: int, limits: ModelLimits, seed: int
) -> SamplingParams:
    """The parameters of one output; ApiError 400 for combinations that cannot work."""
    max_tokens = _max_tokens(wishes, prompt_tokens, limits)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        invalid("min_tokens", f"is {min_tokens}, over the {max_tokens} of {wishes.max_tokens_field}")
    if wishes.structure is not None and min_tokens:
        invalid("min_tokens", "cannot be combined with a constrained output, which ends when it is complete")
    if wishes.structure is not None and request.ignore_eos:
        invalid("ignore_eos", "cannot be combined with a constrained output, which ends when it is complete")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        seed=seed,
        ignore_eos=bool(request.ignore_eos),
        top_p=_or(request.top_p, 1.0),
        top_k=request.top_k or 0,
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias={int(key): value for key, value in (request.logit_bias or {}).items()},
        min_tokens=min_tokens,
        stop_token_ids=request.stop_token_ids or [],
        logprobs=wishes.logprobs,
        structure=wishes.structure,
        prompt_logprobs=wishes.logprobs if wishes.scored else -1,
    )


def _max_tokens(wishes: OutputWishes, prompt_tokens: int, limits: ModelLimits) -> int:
    room = limits.longest - prompt_tokens
    if wishes.max_tokens is None:
        return room
    if wishes.max_tokens > room:
        field = wishes.max_tokens_field
        raise ApiError(
            400,
            f"{field}: {prompt_tokens} prompt tokens and {wishes.max_tokens} to generate are"
            f" {prompt_tokens + wishes.max_tokens}, a sequence holds {limits.longest};"
            f" {field} up to {room} would fit",
            param=field,
            code="context_length_exceeded",
        )
    return wishes.max_tokens


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
