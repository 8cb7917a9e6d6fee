"""A request as every part of the runtime sees it: pure data, also on the wire."""

from typing import Literal

import msgspec


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must look like: `json` (any JSON object) or `json_schema` (`schema`, as JSON text)."""

    kind: Literal["json", "json_schema"]
    schema: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. `temperature` 0 is greedy; noise is a function of (seed, position).

    top_p, top_k, min_p    applied after the temperature, in this order; 1.0, 0 and 0.0 are off
    presence_penalty, frequency_penalty   subtracted once, and per occurrence, from tokens of the output
    repetition_penalty     divides positive and multiplies negative logits of tokens seen in prompt or output
    logit_bias             token id -> added to its logit
    min_tokens             end-of-sequence and stop ids cannot be chosen before so many outputs
    stop_token_ids         end the sequence like the model's own end-of-sequence tokens
    logprobs               -1: none; n >= 0: the chosen token's logprob and those of the n best, under the
                           model's own distribution (before temperature, penalties and bias)
    structure              constrains the output; None: free text
    prompt_logprobs        as `logprobs`, of each prompt token but the first, given those before it

    `max_tokens` 0 runs the prompt and nothing else.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    want_logits: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    logprobs: int = -1
    structure: Structure | None = None
    prompt_logprobs: int = -1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenised request. `id` is unique among all requests of a frontend's lifetime.

    priority    lower is served first
    cache_salt  requests share cached prefixes only with those of the same salt (an adapter, a tenant)
    """

    id: int
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""


class FinishReason:
    """Why a sequence ended: what clients see."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"
