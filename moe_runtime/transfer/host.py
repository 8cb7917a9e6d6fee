"""KV transfer between ranks of one host: the source's pool is a shared window, a pull is a copy.

Layout of a pool window: int64 [blocks] lease stamps (lease id + 1; 0: none), then the layers'
caches [layers, blocks, block_tokens, entry]. Leases may share the blocks of a common prefix, but
the last block of each is its own, and carries its stamp. A pull copies on a thread of its own and
checks the stamp before and after, so blocks of a lease that ended are never taken for good.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from moe_runtime.errors import LeaseExpired, TransferError
from moe_runtime.shared_memory import Window, WindowAddress
from moe_runtime.spec.kv import INDEX_MASK, KVGroup
from moe_runtime.transfer.handoff import KVSource
from moe_runtime.transfer.interface import LayoutFingerprint


class PoolExport(msgspec.Struct, frozen=True, kw_only=True):
    """What a source tells its peers at start-up."""

    instance: str
    rank: int
    address: WindowAddress
    num_blocks: int
    layout: LayoutFingerprint


class HostPool:
    """The KV pool of one rank in a window that other ranks of the host may read."""

    def __init__(self, window: Window, group: KVGroup, num_blocks: int) -> None:
        self.window = window
        self.num_blocks = num_blocks
        self.stamps = cast("NDArray[np.int64]", window.array(np.int64, (num_blocks,)))
        dtype = getattr(torch, group.dtype)
        raw = torch.frombuffer(window.memory, dtype=torch.uint8)[8 * num_blocks :]
        shape = (len(group.layers), num_blocks, group.block_tokens, group.entry)
        self.cache = list(raw[: num_blocks * group.block_bytes].view(dtype).view(shape).unbind(0))

    @classmethod
    def create(cls, group: KVGroup, num_blocks: int) -> "HostPool":
        window = Window.create("moe-runtime-kv", num_blocks * (8 + group.block_bytes))
        return cls(window, group, num_blocks)

    def stamp(self, blocks: NDArray[np.int32], lease: int | None) -> None:
        """Mark a lease's blocks, in token order, as readable, or with None as not any more."""
        self.stamps[blocks[-1] & INDEX_MASK] = 0 if lease is None else lease + 1


class HostPull:
    """A pull on the transfer thread."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def poll(self) -> bool | None:
        """None while it runs, True when the KV is here; raises TransferError."""
        if not self._future.done():
            return None
        self._future.result()
        return True


class HostTransport:
    """The pulling end on one rank: knows its own cache and the exported pools of its peers."""

    def __init__(
        self,
        cache: list[torch.Tensor],
        group: KVGroup,
        layout: LayoutFingerprint,
        peers: list[PoolExport],
    ) -> None:
        """Raises LayoutMismatch if a peer stores KV differently."""
        for peer in peers:
            layout.require_equal(peer.layout, f"{peer.instance} rank {peer.rank}")
        self._cache = cache
        self._group = group
        self._exports = {(p.instance, p.rank): p for p in peers}
        self._pools: dict[tuple[str, int], HostPool] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-pull")

    def start_pull(self, source: KVSource, blocks: NDArray[np.int32]) -> HostPull:
        """Begin to copy the leased blocks into `blocks` of this rank, in order."""
        return HostPull(self._thread.submit(self._copy, source, blocks.copy()))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _copy(self, source: KVSource, blocks: NDArray[np.int32]) -> None:
        pool = self._connect(source)
        remote = np.asarray(source.blocks[0], np.int64) & INDEX_MASK
        if len(remote) > len(blocks):
            raise TransferError(f"{len(remote)} blocks offered, {len(blocks)} allocated")
        self._require_lease(pool, source, remote)
        src = torch.from_numpy(remote)
        dst = torch.from_numpy(blocks[: len(remote)].astype(np.int64) & INDEX_MASK)
        for mine, theirs in zip(self._cache, pool.cache, strict=True):
            mine[dst] = theirs[src]
        self._require_lease(pool, source, remote)

    def _require_lease(self, pool: HostPool, source: KVSource, remote: NDArray[np.int64]) -> None:
        known = len(remote) > 0 and remote.max() < pool.num_blocks
        if not known or pool.stamps[remote[-1]] != source.lease + 1:
            raise LeaseExpired(f"lease {source.lease} of {source.instance} rank {source.rank} is over")

    def _connect(self, source: KVSource) -> HostPool:
        key = (source.instance, source.rank)
        if key not in self._pools:
            export = self._exports.get(key)
            if export is None:
                raise TransferError(f"{source.instance} rank {source.rank} exports no KV pool")
            try:
                window = Window.open(export.address)
            except OSError as error:
                raise TransferError(
                    f"the KV pool of {source.instance} rank {source.rank} is gone: {error}"
                ) from error
            self._pools[key] = HostPool(window, self._group, export.num_blocks)
        return self._pools[key]
