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

    The owner stamps the last block with the lease; a reader compares before and after it reads, so
    a lease that ended meanwhile is noticed. `blocks[g]` are the blocks of group g, in token order.
    `weights` is the version of the weights that computed them: KV of others is of no use.
    """

    instance: str
    rank: int
    lease: int
    num_tokens: int
    blocks: list[list[int]]
    weights: int = 0


class Handoff(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prompt is prefilled: everything the decode side needs to go on.

    Sampling noise is a function of (seed, output position), so no generator state travels; the
    sampling parameters are in the request itself, which the frontend keeps.
    """

    request: int
    first_token: int
    source: KVSource
