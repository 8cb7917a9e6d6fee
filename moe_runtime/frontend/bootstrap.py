"""What a frontend is told when it starts: who it is, and where the ranks listen."""

import msgspec


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank listens, what it is, and how many tokens its KV cache and sequences its batch holds."""

    instance: str
    deployment: str
    rank: int
    address: str
    kv_tokens: int
    max_sequences: int


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend is told when it starts. `frontends`: how many there are, this one among them.

    `peers`: where each of them listens, this one too, in order of their numbers; empty if it is alone.
    """

    frontend: int
    frontends: int
    address: str
    ranks: list[RankAddress]
    peers: list[str] = []
