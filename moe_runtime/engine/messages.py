"""What ranks, frontends and peers say to each other: typed msgpack, never pickle.

Every process has one inbox (a PULL socket); whoever knows its address may PUSH a message.
"""

import msgspec

from moe_runtime.report.records import StepBatch
from moe_runtime.report.timeline import RankTimeline
from moe_runtime.spec.requests import Request
from moe_runtime.transfer.handoff import Handoff

# Request ids carry their frontend: id >> FRONTEND_SHIFT.
FRONTEND_SHIFT = 48


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: send what concerns me to `address`."""

    frontend: int
    address: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: weights are loaded, requests are welcome."""

    instance: str
    rank: int


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: run a request. `handoff`: only to its first token, then hand it over."""

    request: Request
    handoff: bool


class SubmitTransferred(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> decode rank: go on with a request that was prefilled elsewhere."""

    request: Request
    handoff: Handoff


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: drop a request, whatever its state."""

    request: int


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode rank -> prefill rank: the leased blocks are pulled (or not wanted any more)."""

    lease: int


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode rank -> prefill rank: the leased blocks are still wanted."""

    lease: int


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> peer rank: there is work for step `step`; do not stay parked."""

    step: int


class Collect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: send the steps recorded so far."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: finish what is there, then stop."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token's logprob, and the best tokens with theirs, best first."""

    chosen: float
    top_ids: list[int]
    top: list[float]


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token. `finish_reason` is set on the last one; `logits` float32 bytes if wanted."""

    request: int
    token: int
    finish_reason: str | None = None
    logits: bytes | None = None
    logprobs: Logprobs | None = None


class StepTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: all its tokens of one step."""

    instance: str
    rank: int
    tokens: list[Token]


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill rank -> frontend: first token, and where the KV waits to be pulled."""

    handoff: Handoff
    logits: bytes | None = None
    logprobs: Logprobs | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: the request cannot be served."""

    request: int
    reason: str


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: the answer to a Collect: recorded steps, and the trace if one is kept."""

    instance: str
    rank: int
    batch: StepBatch
    timeline: RankTimeline


ToRank = Hello | Submit | SubmitTransferred | Abort | Release | Renew | Wake | Collect | Shutdown
ToFrontend = Ready | StepTokens | Prefilled | Refused | Stats
