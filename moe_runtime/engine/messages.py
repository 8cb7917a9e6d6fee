"""What ranks, frontends and peers say to each other: typed msgpack, never pickle.

Every process has one inbox (a PULL socket); whoever knows its address may PUSH a message.
"""

import msgspec

from moe_runtime.engine.balancing.wire import (
    BalancingStatus,
    ToFrontendBalancing,
    ToRankBalancing,
)
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
    """Frontend -> rank: run a request. `handoff`: only to its first token, then hand it over.

    `bounded`: answer Full instead of promising more than the rank has room for.
    """

    request: Request
    handoff: bool
    bounded: bool = False


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> decode rank: promise to go on with a request that is prefilled meanwhile.

    The answer is Reserved or Full; an Abort gives it back.
    """

    request: int
    tokens: int


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


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: I am leaving. When all `frontends` have left, finish what is there, then stop."""

    frontend: int
    frontends: int


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token's logprob, and the best tokens with theirs, best first."""

    chosen: float
    top_ids: list[int]
    top: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of each of the n prompt tokens but the first: its logprob, and the k best tokens, best first.

    chosen float32 [n], top_ids int32 [n, k], top float32 [n, k], as bytes.
    """

    k: int
    chosen: bytes
    top_ids: bytes
    top: bytes


class Start(msgspec.Struct, frozen=True, array_like=True):
    """How a request began at the rank that ran its prompt: travels with its first token.

    cached_tokens    prompt tokens whose KV was in the prefix cache
    queue_seconds    from arrival at the rank to admission
    prompt_logprobs  if they were asked for
    """

    cached_tokens: int
    queue_seconds: float
    prompt_logprobs: PromptLogprobs | None = None


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token. `finish_reason` is set on the last one; `logits` float32 bytes if wanted.

    `start` is set on the first token of a rank that ran the prompt itself.
    """

    request: int
    token: int
    finish_reason: str | None = None
    logits: bytes | None = None
    logprobs: Logprobs | None = None
    start: Start | None = None


class StepTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: all its tokens of one step."""

    instance: str
    rank: int
    tokens: list[Token]


class PromptDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: the prompt of a request that wants no tokens is through, which is its end."""

    request: int
    instance: str
    start: Start | None = None


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill rank -> frontend: first token, and where the KV waits to be pulled."""

    handoff: Handoff
    logits: bytes | None = None
    logprobs: Logprobs | None = None
    start: Start | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: the request cannot be served."""

    request: int
    instance: str
    reason: str


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode rank -> frontend: the request has its place here."""

    request: int


class Full(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: no room for the request now. So many tokens and requests are promised to all."""

    request: int
    instance: str
    rank: int
    tokens: int
    requests: int


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: the answer to a Collect: recorded steps, and the trace if one is kept."""

    instance: str
    rank: int
    batch: StepBatch
    timeline: RankTimeline


class RankTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has done since it started; differences of two of them are rates.

    steps, step_seconds    steps with rows on some rank of the instance, and their wall seconds
    phase_seconds          the same seconds by phase, in the order of report.records.PHASES
    decode_rows            decode rows run; with `prefill_rows` all rows of all steps
    prefill_rows           prefill rows run, recomputed ones among them
    new_prefill_tokens     prompt tokens computed for the first time anywhere
    cached_prefill_tokens  prompt tokens found in this rank's prefix cache
    recomputed_tokens      prefill rows run again after a preemption or a failed pull
    output_tokens          tokens sent to frontends
    pulled_tokens          prompt tokens whose KV was asked of the rank that ran them
    reused_tokens          those of sequences prefilled elsewhere whose KV was in this rank's prefix cache
    step_fill              sum over the steps of: rows of all ranks / (ranks x rows of the fullest)
    received_rows          per MoE layer, (token, expert) pairs that this rank's slots received
    rows_histogram         steps by rows: entry i counts those of at most ROWS_BUCKETS[i], the last the rest
    dispatch_modes         steps by dispatch mode, in the order of spec.limits.DISPATCH_MODES
    overlap_reasons        steps by why they ran as one or two micro-batches: report.records.OVERLAP_REASONS
    """

    steps: int = 0
    step_seconds: float = 0.0
    phase_seconds: list[float] = []
    decode_rows: int = 0
    prefill_rows: int = 0
    new_prefill_tokens: int = 0
    cached_prefill_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    pulled_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    step_fill: float = 0.0
    received_rows: list[int] = []
    rows_histogram: list[int] = []
    dispatch_modes: list[int] = []
    overlap_reasons: list[int] = []


# Upper bounds of the steps' sizes in `rows_histogram`.
ROWS_BUCKETS = tuple(1 << i for i in range(13))


class Watch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: send me a Status every `seconds` and when your load changes; 0 ends it."""

    frontend: int
    seconds: float


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: how the rank is doing. Sent by the step loop itself, so it is a heartbeat too.

    time            seconds of the rank's monotonic clock
    step            number of the newest step
    waiting         requests queued; `waiting_tokens` tokens they still have to compute
    running         sequences in the table, those among them whose KV is on the way are `pulling`
    kv_blocks       all blocks; `kv_used` of them hold live sequences or leases, `kv_cached` of the rest
                    hold prefixes that a new request may reuse
    others_tokens   tokens promised to other frontends, of `others_requests` requests
    chunk_tokens    prefill rows that the newest step was allowed
    balancing       None where experts stay where they are
    """

    instance: str
    deployment: str
    rank: int
    time: float
    step: int
    waiting: int
    waiting_tokens: int
    running: int
    pulling: int
    kv_blocks: int
    kv_used: int
    kv_cached: int
    block_tokens: int
    others_tokens: int
    others_requests: int
    chunk_tokens: int
    totals: RankTotals
    balancing: BalancingStatus | None = None


ToRank = (
    Hello
    | Watch
    | Submit
    | Reserve
    | SubmitTransferred
    | Abort
    | Release
    | Renew
    | Wake
    | Collect
    | Goodbye
    | ToRankBalancing
)
ToFrontend = (
    Ready
    | StepTokens
    | PromptDone
    | Prefilled
    | Refused
    | Reserved
    | Full
    | Stats
    | Status
    | ToFrontendBalancing
)
