"""Leases: blocks that a prefill rank keeps for a decode rank to pull. Pure: `now` is an argument.

A lease ends by release (the puller is done), by expiry without renewal, or by abort of its request;
its blocks go back to the pool exactly once. Late or double releases are no-ops.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Blocks held for `request` until `expiry` seconds."""

    id: int
    request: int
    blocks: NDArray[np.int32]
    expiry: float


class Leases:
    """The leases of one rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases: dict[int, Lease] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self._leases.values())

    def grant(self, request: int, blocks: NDArray[np.int32], now: float) -> Lease:
        """Hold `blocks` for `request`."""
        lease = Lease(id=self._next, request=request, blocks=blocks, expiry=now + self.seconds)
        self._next += 1
        self._leases[lease.id] = lease
        return lease

    def renew(self, lease_id: int, now: float) -> None:
        """Start the lease's time again; nothing happens if it is gone."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._leases[lease_id] = replace(lease, expiry=now + self.seconds)

    def release(self, lease_id: int) -> NDArray[np.int32] | None:
        """The blocks to free, or None if the lease is gone already."""
        lease = self._leases.pop(lease_id, None)
        return None if lease is None else lease.blocks

    def release_request(self, request: int) -> list[NDArray[np.int32]]:
        """Blocks of every lease of an aborted request."""
        ids = [lease.id for lease in self._leases.values() if lease.request == request]
        return [self._leases.pop(i).blocks for i in ids]

    def next_expiry(self) -> float | None:
        return min((lease.expiry for lease in self._leases.values()), default=None)

    def expire(self, now: float) -> list[Lease]:
        """Remove and return the leases that are over."""
        over = [lease for lease in self._leases.values() if now >= lease.expiry]
        for lease in over:
            del self._leases[lease.id]
        return over
