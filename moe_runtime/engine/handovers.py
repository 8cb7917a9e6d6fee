"""Handovers: one rank's KV on its way to another: the leases it grants, and the pulls it makes. LOCAL.

Knows no frontends. Blocks of a lease, and those that are copied into, stay held until that has ended.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.identity import Identity
from moe_runtime.engine.messages import Release, Renew
from moe_runtime.engine.sockets import Outbox
from moe_runtime.engine.tally import Tally
from moe_runtime.errors import TransferError
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.scheduler.step import TokenEvent
from moe_runtime.transfer.handoff import Handoff, KVSource
from moe_runtime.transfer.host import HostPool
from moe_runtime.transfer.interface import KVTransport, Pull
from moe_runtime.transfer.leases import Leases


@dataclass(slots=True)
class _Pulling:
    sequence: Sequence
    pull: Pull
    source: KVSource


class _NothingToPull:
    """All is here already: the pull ends when it is first asked about."""

    def poll(self) -> bool:
        return True


@dataclass(slots=True)
class Handovers:
    """`pool` and `leases` serve a prefill rank, `transport` a decode rank; either may be unused.

    `weights` tells the version of the weights in use: KV that others computed is of no use.
    """

    identity: Identity
    outbox: Outbox
    scheduler: Scheduler
    tally: Tally
    leases: Leases
    pool: HostPool | None
    transport: KVTransport | None
    weights: Callable[[], int]
    _sources: dict[int, KVSource] = field(default_factory=dict)
    _pulls: list[_Pulling] = field(default_factory=list)
    _renew_at: float = 0.0

    @property
    def busy(self) -> bool:
        """Blocks are leased or copied into."""
        return bool(self._pulls) or len(self.leases) > 0

    @property
    def num_pulls(self) -> int:
        """Sequences whose KV is on the way."""
        return len(self._pulls)

    @property
    def leased_tokens(self) -> int:
        """What the leased blocks could hold."""
        return self.leases.num_blocks * self.scheduler.limits.block_tokens

    def patience(self, now: float) -> float:
        """Seconds until there is something to look after."""
        if self._pulls:
            return 0.0
        limit = self.leases.seconds / 6 if self._sources else float("inf")
        expiry = self.leases.next_expiry()
        return limit if expiry is None else min(limit, expiry - now)

    def poll(self, now: float) -> bool:
        """Look after pulls and leases; True if any ended."""
        ended = self._poll_pulls()
        self._renew_ours(now)
        over = self.leases.expire(now)
        for lease in over:
            self._end_lease(lease.blocks)
        return ended or bool(over)

    def end_request(self, request: int) -> None:
        """The request is dropped: nobody needs its leases, and what is copied for it ends by itself."""
        for blocks in self.leases.release_request(request):
            self._end_lease(blocks)
        self.give_up(request)

    # -- for whom this rank has run a prompt ---------------------------------------------------

    def grant(self, event: TokenEvent) -> Handoff:
        """Lease the blocks of a sequence that leaves after its first token."""
        assert event.blocks is not None
        request, me = event.sequence.request, self.identity
        blocks = event.blocks[: self.scheduler.blocks_for(event.sequence.prompt_len)]
        lease = self.leases.grant(request.id, event.blocks, time.monotonic())
        if self.pool is not None:
            self.pool.stamp(event.blocks, lease.id)
        source = KVSource(
            instance=me.instance,
            rank=me.rank,
            lease=lease.id,
            num_tokens=event.sequence.prompt_len,
            blocks=[blocks.tolist()],
            weights=self.weights(),
        )
        return Handoff(request=request.id, first_token=event.token, source=source)

    def release(self, lease: int) -> None:
        """A decode rank is done with a lease, which may be over already."""
        blocks = self.leases.release(lease)
        if blocks is not None:
            self._end_lease(blocks)

    def _end_lease(self, blocks: NDArray[np.int32]) -> None:
        if self.pool is not None:
            self.pool.stamp(blocks, None)
        self.scheduler.pool.free(blocks.tolist())

    # -- whose prompt another rank has run -----------------------------------------------------

    def expect(self, request: int, source: KVSource) -> None:
        """A request came whose KV lies elsewhere; its lease is kept alive."""
        self._sources[request] = source

    def give_up(self, request: int) -> None:
        """The request is not served here: let its lease go, unless it is being copied."""
        source = self._sources.pop(request, None)
        if source is not None:
            self._let_go(source)

    def start_pulls(self) -> None:
        """Begin to fetch the KV of sequences that have blocks now."""
        for sequence in self.scheduler.take_started_pulls():
            source = self._sources.pop(sequence.request.id)
            self._pulls.append(_Pulling(sequence, self._start_pull(sequence, source), source))

    def close(self) -> None:
        """Stop the transfer thread."""
        if self.transport is not None:
            self.transport.close()

    def _start_pull(self, sequence: Sequence, source: KVSource) -> Pull:
        """Fetch what the prefix cache does not have of the sequence's KV."""
        assert self.transport is not None
        table, here = self.scheduler.table, sequence.kept_blocks
        there = [blocks[here:] for blocks in source.blocks]
        reused = min(here * self.scheduler.limits.block_tokens, source.num_tokens)
        self.tally.reused_tokens += reused
        self.tally.pulled_tokens += source.num_tokens - reused
        if not any(there):
            return _NothingToPull()
        blocks = table.blocks[sequence.row, here : table.num_blocks[sequence.row]]
        rest = msgspec.structs.replace(source, num_tokens=source.num_tokens - reused, blocks=there)
        return self.transport.start_pull(rest, blocks)

    def _poll_pulls(self) -> bool:
        ended = False
        for pulling in list(self._pulls):
            try:
                arrived = pulling.pull.poll()
            except TransferError:
                arrived = False  # recomputed from the prompt, which this rank has
            if arrived is None:
                continue
            arrived = arrived and pulling.source.weights == self.weights()
            self._pulls.remove(pulling)
            self.scheduler.pulled(pulling.sequence, ok=arrived)
            self._let_go(pulling.source)
            ended = True
        return ended

    def _renew_ours(self, now: float) -> None:
        """Keep the leases alive whose blocks this rank still wants: queued here, or being pulled."""
        if now < self._renew_at:
            return
        self._renew_at = now + self.leases.seconds / 3
        for source in [*self._sources.values(), *(p.source for p in self._pulls)]:
            self.outbox.send(self._address(source), Renew(lease=source.lease))

    def _let_go(self, source: KVSource) -> None:
        self.outbox.send(self._address(source), Release(lease=source.lease))

    def _address(self, source: KVSource) -> str:
        return self.identity.addresses[source.instance, source.rank]
