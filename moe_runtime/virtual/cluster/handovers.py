"""Handovers: KV on its way from prefill to decode ranks: leases and copies, as engine.handovers has them.

Owns who holds blocks for whom. A lease lives as long as its decode rank wants it (it is renewed in time), and
for LEASE_SECONDS after the instance of that rank has failed. Knows no clients and no routing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from moe_runtime.engine.limits import LEASE_SECONDS
from moe_runtime.scheduler.counted import CountedScheduler
from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.scheduler.step import TokenEvent
from moe_runtime.transfer.leases import Leases
from moe_runtime.virtual.cluster.clock import Clock, Kind
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.network import Copy, Network, RankName


@dataclass(frozen=True, slots=True)
class Source:
    """Where a prefilled sequence's KV lies. `leases` are the rank's of that life."""

    rank: RankName
    lease: int
    leases: Leases


@dataclass(frozen=True, slots=True)
class _Wanted:
    source: Source
    instance: str


class Handovers:
    """Of all ranks. `kv_seconds`: from tokens to the seconds their KV takes, alone on both ranks' links."""

    def __init__(
        self,
        instances: Mapping[str, Instance],
        *,
        clock: Clock,
        network: Network,
        kv_seconds: Callable[[int], float],
    ) -> None:
        self._instances, self._clock, self._network = instances, clock, network
        self._kv_seconds = kv_seconds
        self._leases: dict[RankName, Leases] = {}
        # By request: not asked for yet, and on the way.
        self._expected: dict[int, _Wanted] = {}
        self._pulling: dict[int, _Wanted] = {}

    # -- where the prompt has run ---------------------------------------------------------------

    def grant(self, rank: RankName, event: TokenEvent) -> Source:
        """Lease the blocks of a sequence that leaves after its first token."""
        assert event.blocks is not None
        leases = self._leases.setdefault(rank, Leases(LEASE_SECONDS))
        lease = leases.grant(event.sequence.request.id, event.blocks, self._clock.now)
        return Source(rank, lease.id, leases)

    def let_go(self, source: Source) -> None:
        """Nobody wants the KV any more."""
        instance, rank = source.rank

        def message(scheduler: CountedScheduler) -> None:
            blocks = source.leases.release(source.lease) if self._alive(source) else None
            if blocks is not None:
                scheduler.pool.free(blocks)

        self._instances[instance].post(rank, message)

    # -- where it goes on -------------------------------------------------------------------------

    def expect(self, request: int, source: Source, instance: str) -> None:
        """A rank of the instance will want the request's KV."""
        self._expected[request] = _Wanted(source, instance)

    def give_up(self, request: int) -> None:
        """The request is not decoded: let its lease go, unless it is being copied."""
        wanted = self._expected.pop(request, None)
        if wanted is not None:
            self.let_go(wanted.source)

    def fetch(self, instance: str, rank: int, sequence: Sequence) -> None:
        """The sequence has blocks: what the prefix cache does not have of its KV may come."""
        wanted = self._expected.pop(sequence.request.id)
        source, target = wanted.source, self._instances[instance]
        self._pulling[sequence.request.id] = wanted
        found = sequence.kept_blocks * target.ranks.scheduler(rank).limits.block_tokens
        missing = sequence.prompt_len - found
        if missing <= 0 or not self._alive(source):
            self._arrived(instance, rank, sequence, ok=missing <= 0)
            return
        self._network.start(
            source.rank, (instance, rank), sequence, self._kv_seconds(missing), self._clock.now
        )

    def copied(self, copy: Copy, *, ok: bool = True) -> None:
        """A copy of KV has ended."""
        self._arrived(*copy.target, copy.sequence, ok=ok)

    def fail(self, name: str) -> None:
        """An instance dies: what was to come from it will not; what it had leased is free after a while."""
        now = self._clock.now
        self._network.break_target(name, now)
        for copy in self._network.break_source(name, now):
            self.copied(copy, ok=False)
        for wanted in (self._expected, self._pulling):
            for request in [r for r, w in wanted.items() if w.instance == name]:
                source = wanted.pop(request).source
                if source.rank[0] != name:
                    self._clock.at(now + LEASE_SECONDS, Kind.OUTSIDE, partial(self.let_go, source))
        for rank in [rank for rank in self._leases if rank[0] == name]:
            del self._leases[rank]

    def _alive(self, source: Source) -> bool:
        """The rank has not failed since it granted the lease."""
        return self._leases.get(source.rank) is source.leases

    def _arrived(self, instance: str, rank: int, sequence: Sequence, *, ok: bool) -> None:
        target = self._instances[instance]

        def message(step: int) -> None:
            target.ranks.pulled(rank, step, sequence, ok=ok)
            self.let_go(self._pulling.pop(sequence.request.id).source)

        target.send(rank, message)
