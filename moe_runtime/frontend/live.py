"""Live: a request on its way, and what has come back of it so far.

Plain state that the fleet fills and its consumer reads; no sockets, no text.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_runtime.engine.messages import Logprobs, PromptLogprobs
from moe_runtime.frontend.router import Target
from moe_runtime.spec.requests import Request
from moe_runtime.transfer.handoff import Handoff


def _nobody() -> None:
    """Nobody wants to hear of news."""


@dataclass(slots=True)
class Route:
    """A place at a rank, one of its role's targets: how many tokens count there, and whether it was told."""

    target: Target
    index: int
    tokens: int
    told: bool = False


@dataclass(slots=True, eq=False)
class Live:
    """Times are seconds of time.monotonic().

    notify         called after news: tokens, or the end
    logprobs       one for each token, if they were asked for
    prompt_logprobs  come with the first token, if they were asked for
    cached_tokens  prompt tokens that the rank which ran the prompt had in its prefix cache
    queue_seconds  that the request waited there
    finish_reason  set at the end, with `error` if it ended badly
    refused        a rank cannot serve what the request asks for
    no_room        no rank has room for it now
    rank           index of the rank that it has to enter at; None: any
    routes         its place in each role where it has one
    tried          indices of the ranks of a role that turned it away
    bounded        ranks may turn it away; then a decode rank has to say that its place there is `reserved`
    handoff        its prompt has run, and it waits for that word
    """

    request: Request
    sent: float
    notify: Callable[[], None] = _nobody
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    logits: bytes | None = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    refused: bool = False
    no_room: bool = False
    rank: int | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    routes: dict[str, Route] = field(default_factory=dict)
    tried: dict[str, set[int]] = field(default_factory=dict)
    bounded: bool = False
    reserved: bool = False
    handoff: Handoff | None = None
