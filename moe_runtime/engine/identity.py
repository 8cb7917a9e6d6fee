"""Identity: who a rank is, for whoever speaks in its name. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this rank is. `addresses[(instance, rank)]` are the inboxes of all ranks of the launch."""

    instance: str
    deployment: str
    rank: int
    num_ranks: int
    addresses: dict[tuple[str, int], str]
