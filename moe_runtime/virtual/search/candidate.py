"""Candidate: instances of prefill and decode joined to one deployment, and what its users would see.

Owns matching by rate, the wait for prefill, the KV link between the two, the Pareto front and the order of
preference. Every prefill rank queues by itself (M/G/1); a router that knows the queues does better.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_runtime.spec.kv import kv_spec
from moe_runtime.virtual.cost.links import bulk_rates
from moe_runtime.virtual.search.option import Option
from moe_runtime.virtual.search.query import Objectives, Query, Workload
from moe_runtime.virtual.search.room import BLOCK_TOKENS
from moe_runtime.virtual.search.space import replaced_tokens

TAIL = 0.1
"""Share of the requests that may wait longer than the TTFT that objectives are held against."""

Limit = Literal["prefill", "TTFT", "decode", "KV link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One deployment in steady state.

    prefill, decode   options of the instances; a unified one is `decode`, without `prefill`
    copies            (prefill, decode) instances
    rate              requests/s of all
    busy              (prefill, decode) share of the time, at that rate; of a unified one's chunks, its batch
    ttft, tpot        seconds: at the 90th percentile, on average
    throughput        output tokens/s per node, of all nodes asked for
    limit             what gives no more: a phase, the wait for prefill, the link between the phases
    """

    prefill: Option | None
    decode: Option
    copies: tuple[int, int]
    rate: float
    busy: tuple[float, float]
    ttft: float
    tpot: float
    throughput: float
    limit: Limit

    @property
    def ranks(self) -> int:
        first = self.prefill.choice.ranks * self.copies[0] if self.prefill else 0
        return first + self.decode.choice.ranks * self.copies[1]

    @property
    def speed(self) -> float:
        """Tokens/s of one user."""
        return 1 / self.tpot

    @property
    def written(self) -> bool:
        return all(o.choice.written for o in (self.prefill, self.decode) if o is not None)

    def meets(self, objectives: Objectives) -> bool:
        return self.ttft <= objectives.ttft and self.tpot <= objectives.tpot


def first_token(option: Option, work: Workload, busy: float) -> float:
    """Seconds to the first token that all but `TAIL` of the requests see, at a share `busy` of the capacity.

    Most of a step under way, the wait for prompts before it (Pollaczek and Khinchine's mean, the tail of an
    exponential), its own steps.
    """
    chunk = option.choice.chunk
    own = work.computed / chunk * option.step
    wait = busy * own * (1 + work.variation) / (2 * (1 - busy))
    late = wait / busy * max(0.0, math.log(busy / TAIL)) if busy > 0 else 0.0
    return (1 - TAIL) * option.step + late + option.chunks * option.step


def most_busy(query: Query, option: Option) -> float:
    """The largest share of the time that prefill may be busy, so that the first token comes in time.

    Where no share is small enough, what the objectives allow.
    """
    asked, work = query.objectives, query.workload
    low, high = 0.0, asked.utilisation
    if first_token(option, work, low) > asked.ttft or first_token(option, work, high) <= asked.ttft:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        if first_token(option, work, middle) <= asked.ttft:
            low = middle
        else:
            high = middle
    return low


def candidates(
    query: Query, prefill: Sequence[Option], decode: Sequence[Option], unified: Sequence[Option]
) -> Iterator[Candidate]:
    """Every way to fill the nodes with instances of a prefill and a decode option, or of a unified one."""
    total, per_node = query.ranks, query.ranks_per_node
    for option in unified:
        yield unified_deployment(query, option, total // option.choice.ranks)
    link = link_rate(query)
    for first in prefill:
        busy = most_busy(query, first)
        for copies in range(1, total // first.choice.ranks + 1):
            mine = copies * first.choice.ranks
            for second in decode:
                ranks = second.choice.ranks
                others = (total - mine) // ranks
                if others and mine % min(ranks, per_node) == 0:
                    yield _pair(query, first, second, (copies, others), link, busy)


def unified_deployment(query: Query, option: Option, copies: int) -> Candidate:
    """Instances that run both phases, full."""
    busy = replaced_tokens(query, option.choice.sequences) / option.choice.chunk
    rate = option.rate * copies
    return Candidate(
        prefill=None,
        decode=option,
        copies=(0, copies),
        rate=rate,
        busy=(busy, 1.0),
        ttft=first_token(option, query.workload, busy),
        tpot=option.tpot,
        throughput=rate * query.workload.output / query.nodes,
        limit="decode",
    )


def pair(query: Query, first: Option, second: Option, copies: tuple[int, int]) -> Candidate:
    """Instances of prefill and decode that serve what the slower of them can, or the link between them."""
    return _pair(query, first, second, copies, link_rate(query), most_busy(query, first))


def _pair(
    query: Query, first: Option, second: Option, copies: tuple[int, int], link: float, most: float
) -> Candidate:
    supply, demand = first.rate * copies[0], second.rate * copies[1]
    linked = link * min(first.choice.ranks * copies[0], second.choice.ranks * copies[1])
    bounds: tuple[tuple[float, Limit], ...] = (
        (supply * most, "prefill" if most == query.objectives.utilisation else "TTFT"),
        (demand, "decode"),
        (linked, "KV link"),
    )
    rate, limit = min(bounds)
    busy = rate / supply
    return Candidate(
        prefill=first,
        decode=second,
        copies=copies,
        rate=rate,
        busy=(busy, rate / demand),
        ttft=first_token(first, query.workload, busy),
        tpot=second.tpot,
        throughput=rate * query.workload.output / query.nodes,
        limit=limit,
    )


def link_rate(query: Query) -> float:
    """Requests/s whose KV one rank can send or receive."""
    model = query.model
    token = kv_spec(model, block_tokens=BLOCK_TOKENS, dtype=model.dtype).token_bytes
    _, between_nodes = bulk_rates(query.machine, query.known)
    return between_nodes / (token * query.workload.input)


def useful(options: Iterable[Option]) -> list[Option]:
    """Options that no other of the same ranks and cut beats in both rate and seconds."""
    kept: list[Option] = []
    alike: dict[tuple[int, int, bool, int], list[Option]] = {}
    for option in options:
        c = option.choice
        alike.setdefault((c.ranks, c.group, c.whole, c.queries), []).append(option)
    for group in alike.values():
        least = math.inf
        for option in sorted(group, key=lambda o: (-o.rate, _seconds(o))):
            if _seconds(option) < least:
                least = _seconds(option)
                kept.append(option)
    return kept


def _seconds(option: Option) -> float:
    """Of a token; in prefill of a step and of a prompt's own steps."""
    return option.tpot or option.step * (1 - TAIL + option.chunks)


def front(found: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other beats in both throughput and speed, from most throughput on."""
    kept: list[Candidate] = []
    for candidate in sorted(found, key=order):
        if not kept or candidate.tpot < kept[-1].tpot:
            kept.append(candidate)
    return kept


def order(candidate: Candidate) -> tuple[float, float, float, int]:
    """Best first: throughput, then speed, then time to the first token, then fewer ranks."""
    return (-candidate.throughput, candidate.tpot, candidate.ttft, candidate.ranks)
