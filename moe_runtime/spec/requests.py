"""A request as every part of the runtime sees it: pure data, also on the wire."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. `temperature` 0 is greedy; noise is a function of (seed, position)."""

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    want_logits: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenised request. `id` is unique among all requests of a frontend's lifetime."""

    id: int
    prompt: list[int]
    sampling: SamplingParams


class FinishReason:
    """Why a sequence ended: what clients see."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"
