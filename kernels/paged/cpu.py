"""Plans for attention over a paged cache on a CPU: gather indices, worked out once per step.

Decode rows are attended in groups of similar length, padded to the group's longest. A padded place
gathers the sequence's own first entry: always valid, whereas the entry past a sequence's end
belongs to nobody and may hold anything, NaN included (0 * NaN would reach the output).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.paged.reference import Segment

GROUP_ENTRIES = 8192  # gathered cache rows per group: bounds the copy (19 MB of 576 floats)
MIN_FILL = 0.75  # shortest / longest context of a group
PREFILL_ENTRIES = 4096  # cache rows gathered at a time
QUERY_BLOCK = 128  # rows attended at a time


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """G sequences attended together, padded to C tokens.

    members  int64 [G]: their rows in the batch; None: the rows [0, G) = the whole batch
    rows     int64 [G * C]: rows of the flattened cache
    padded   bool [G, 1, C] where a place is padding; None where there is none
    """

    members: Tensor | None
    rows: Tensor
    padded_G1C: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """A segment within a group: its tokens' entries are gathered rows [first, end)."""

    start: int
    stop: int
    context: int
    first: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        return self.first + self.context + self.rows


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Segments whose cache entries are gathered by one call: `blocks` int64, one sequence after the other."""

    blocks: Tensor
    parts: tuple[PrefillPart, ...]


def plan_decode(
    blocks_DB: Tensor, context_D: Tensor, *, max_context: int, block_tokens: int
) -> tuple[DecodeGroup, ...]:
    """Groups that cover every row once."""
    lengths = context_D.tolist()
    if not lengths:
        return ()
    if min(lengths) >= MIN_FILL * max_context and len(lengths) * max_context <= GROUP_ENTRIES:
        return (_group(None, blocks_DB, context_D, max_context, block_tokens),)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups, begin = [], 0
    while begin < len(order):
        longest = lengths[order[begin]]
        room = max(1, GROUP_ENTRIES // longest)
        end = begin + 1
        while end < len(order) and end - begin < room and lengths[order[end]] >= MIN_FILL * longest:
            end += 1
        members = torch.tensor(order[begin:end])
        groups.append(_group(members, blocks_DB[members], context_D[members], longest, block_tokens))
        begin = end
    return tuple(groups)


def _group(members: Tensor | None, blocks_GB: Tensor, context_G: Tensor, longest: int, S: int) -> DecodeGroup:
    blocks_GB = blocks_GB[:, : -(-longest // S)]
    rows_GC = (blocks_GB.unsqueeze(-1) * S + torch.arange(S)).view(len(blocks_GB), -1)[:, :longest]
    padded_GC = torch.arange(longest) >= context_G.unsqueeze(-1)
    if not padded_GC.any():
        return DecodeGroup(members, rows_GC.reshape(-1), None)
    rows_GC = torch.where(padded_GC, rows_GC[:, :1], rows_GC)
    return DecodeGroup(members, rows_GC.reshape(-1), padded_GC.unsqueeze(1))


def plan_prefill(segments: Sequence[Segment], *, block_tokens: int) -> tuple[PrefillGroup, ...]:
    """Groups of consecutive segments with up to PREFILL_ENTRIES cache rows each (one segment at least)."""
    groups: list[PrefillGroup] = []
    blocks: list[Tensor] = []
    parts: list[PrefillPart] = []
    first = 0
    for segment in segments:
        used = -(-(segment.context + segment.stop - segment.start) // block_tokens)
        if parts and first + used * block_tokens > PREFILL_ENTRIES:
            groups.append(PrefillGroup(torch.cat(blocks), tuple(parts)))
            blocks, parts, first = [], [], 0
        blocks.append(segment.blocks[:used])
        parts.append(PrefillPart(segment.start, segment.stop, segment.context, first))
        first += used * block_tokens
    if parts:
        groups.append(PrefillGroup(torch.cat(blocks), tuple(parts)))
    return tuple(groups)


def query_blocks(parts: Sequence[PrefillPart]) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows of the step, gathered entries they may see, bool [n, n]: what of the last n entries is ahead).

    Rows go in blocks, so that a block's scores span only the tokens up to its last row: less than the
    full square, and small enough to stay in cache.
    """
    for part in parts:
        for start in range(part.start, part.stop, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, part.stop)
            last = part.first + part.context + stop - part.start
            n = stop - start
            yield slice(start, stop), slice(part.first, last), torch.ones(n, n, dtype=torch.bool).triu(1)
