"""What crosses from a prefill to a decode instance, besides the KV bytes themselves.

Pure data: no torch, no sockets. Block ids are `tier << 28 | index` of the source pool.
"""

import msgspec


class ChunkReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prefilled chunk may be pulled: `blocks[g]` are the blocks of group g it filled."""

    request: int
    epoch: int
    chunk: int
    blocks: list[list[int]]


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks lie: the rank that owns them, and the lease under which they may be read.

    `expiry` is in seconds of the owner's monotonic clock (one host) and is checked by the owner.
    """

    instance: str
    rank: int
    lease: int
    epoch: int
    expiry: float
    num_tokens: int
    blocks: list[list[int]]


class Handoff(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prompt is prefilled: everything the decode side needs to go on.

    Sampling noise is a function of (seed, output position), so no generator state travels.
    """

    request: int
    first_token: int
    source: KVSource
