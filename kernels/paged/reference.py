"""Plans for attention over a paged cache: what all layers of a step share, made once per step.

A plan is opaque to everybody but the attention kernels of the same device. D decode rows,
B blocks per sequence, S tokens per block, C tokens attended to, E values per cache entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Segment(Protocol):
    """Rows [start, stop) of a step: consecutive tokens of one sequence, `context` cached before them.

    `blocks` int64: the sequence's block indices. All of its tokens, these included, are in the cache.
    """

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def blocks(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Block tables and lengths as they are."""

    blocks_DB: Tensor
    context_D: Tensor


def plan_decode(blocks_DB: Tensor, context_D: Tensor, *, max_context: int, block_tokens: int) -> DecodePlan:
    """Plan for decode rows: blocks int64 [D, B], context int64 [D] >= 1 (the row itself included)."""
    del max_context, block_tokens
    return DecodePlan(blocks_DB, context_D)


def plan_prefill(segments: Sequence[Segment], *, block_tokens: int) -> Sequence[Segment]:
    """Plan for prefill rows."""
    del block_tokens
    return segments


def sequence_entries(cache_BSE: Tensor, blocks_B: Tensor, num_tokens: int) -> Tensor:
    """[num_tokens, E]: a sequence's cache entries in order. Entries past the end are never read."""
    S, E = cache_BSE.shape[1:]
    return cache_BSE[blocks_B[: -(-num_tokens // S)]].view(-1, E)[:num_tokens]
