"""Live: a request on its way, and what has come back of it so far.

Plain state that the fleet fills and its consumer reads; no sockets, no text.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_runtime.engine.messages import Logprobs
from moe_runtime.spec.requests import Request


def _nobody() -> None:
    """Nobody wants to hear of news."""


@dataclass(slots=True, eq=False)
class Live:
    """Times are seconds of time.monotonic().

    notify         called after news: tokens, or the end
    logprobs       one for each token, if they were asked for
    cached_tokens  prompt tokens that the rank which ran the prompt had in its prefix cache
    queue_seconds  that the request waited there
    finish_reason  set at the end, with `error` if it ended badly
    refused        a rank cannot serve what the request asks for
    route          (role, index of the target, tokens counted there)
    """

    request: Request
    sent: float
    notify: Callable[[], None] = _nobody
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    logits: bytes | None = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    refused: bool = False
    prefill_instance: str | None = None
    decode_instance: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    route: tuple[str, int, int] | None = None
