"""Explain: where the GPU time of an output token goes, and in what two candidates differ most.

Owns one account: a token costs all ranks' time divided by all tokens. It is spent in decode and prefill by
part of the step, and idle: ranks that wait for the other phase, keep TTFT short, or have no instance.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from moe_runtime.virtual.cost.shapes import Part
from moe_runtime.virtual.search.candidate import Candidate
from moe_runtime.virtual.search.option import Option
from moe_runtime.virtual.search.query import Query

ROWS: Mapping[str, tuple[Part, ...]] = MappingProxyType(
    {
        "attention": ("attention",),
        "dense products": ("dense", "router"),
        "experts": ("experts",),
        "transfers not hidden": ("dispatch", "combine", "collective"),
        "uneven load": ("imbalance",),
        "kernel starts": ("launch",),
        "other kernels": ("other",),
    }
)
IDLE = "idle"


class Share(NamedTuple):
    """GPU microseconds per output token; `where` is decode, prefill or idle."""

    where: str
    part: str
    seconds: float


def account(query: Query, candidate: Candidate) -> list[Share]:
    """Shares that sum to ranks x nodes' time per output token, in a fixed order."""
    tokens = candidate.rate * query.workload.output
    whole = query.ranks / tokens
    shares = _busy("decode", candidate.decode, candidate.copies[1], candidate.busy[1], tokens)
    if candidate.prefill is not None:
        shares += _busy("prefill", candidate.prefill, candidate.copies[0], candidate.busy[0], tokens)
    return [*shares, Share(IDLE, IDLE, whole - sum(s.seconds for s in shares))]


def _busy(where: str, option: Option, copies: int, busy: float, tokens: float) -> list[Share]:
    scale = option.choice.ranks * copies * busy / tokens / option.cost.seconds
    return [
        Share(where, name, scale * sum(option.cost.parts[p] for p in parts)) for name, parts in ROWS.items()
    ]


def largest_difference(query: Query, winner: Candidate, other: Candidate) -> Share:
    """The share of which `other` spends most more than `winner`: seconds are the difference."""
    mine = {(s.where, s.part): s.seconds for s in account(query, winner)}
    shares = account(query, other)
    more = [Share(s.where, s.part, s.seconds - mine.get((s.where, s.part), 0.0)) for s in shares]
    return max(more, key=lambda s: s.seconds)


def why(query: Query, winner: Candidate, other: Candidate) -> str:
    """In words, why a candidate has less throughput than the winner."""
    share = largest_difference(query, winner, other)
    more = f"{share.seconds * 1e6:+.0f} us"
    if share.where != IDLE:
        return f"{more} {share.part} in {share.where}"
    spare = query.ranks - other.ranks
    if spare > query.ranks - winner.ranks:
        return f"{more} idle: {spare} ranks without an instance"
    return f"{more} idle: {other.limit} gives no more"
