"""Rows of a scheduler in virtual time: what a step counts of them, and who decodes together. Pure.

Owns what follows from the numbers of rows that decode while nothing else changes. Decides nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.sequences import Sequence, SequenceTable

Rows = NDArray[np.intp]


class Flight(NamedTuple):
    """Who is sampled in a step: rows of the table and their admissions, the `decode_rows` first."""

    decode_rows: int
    rows: Rows
    stamps: NDArray[np.int64]


class Counted(NamedTuple):
    """A step of one rank, as numbers.

    decode_rows       sequences that decode; `context` the tokens they attend to, their own included
    prefill_tokens    computed for the first time, `recomputed_tokens` again, `cached_tokens` as in Scheduled
    pairs             sum over the prefill rows of the tokens each attends to
    prefix            tokens that were cached before, of the sequences in prefill
    flight            who is sampled
    """

    decode_rows: int
    context: int
    prefill_tokens: int
    recomputed_tokens: int
    cached_tokens: int
    pairs: int
    prefix: int
    flight: Flight


@dataclass(slots=True)
class Crew:
    """Rows that decode together while nothing changes, and what follows from their numbers. N of them.

    until    turns until one of them has all its tokens
    context  tokens they attend to in the next turn
    first_N  turns before the one in which each needs another block
    kept_N   turns before the one that completes a unit of each; None: to be looked up
    """

    rows: Rows
    until: int
    context: int
    first_N: NDArray[np.int32]
    kept_N: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, table: "CountedTable", rows: Rows, block_tokens: int) -> "Crew":
        """The rows as they are before a turn."""
        tokens = table.num_tokens[rows]
        return cls(
            rows=rows,
            until=int(np.minimum.reduce(table.max_tokens[rows] - tokens)) if len(rows) else 0,
            context=int(np.add.reduce(tokens, dtype=np.int64)),
            first_N=table.num_blocks[rows] * block_tokens + 1 - tokens,
        )

    def affordable_turns(self, most: int, free: int, block_tokens: int) -> int:
        """How many turns, at most `most`, `free` blocks are enough for."""
        low, high = 0, max(0, most)
        if len(self.rows) * (high // block_tokens + 1) <= free:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if int(np.maximum(-(-(middle - self.first_N) // block_tokens), 0).sum()) <= free:
                low = middle
            else:
                high = middle - 1
        return low


class CountedTable(SequenceTable):
    """Knows its decode and prefill rows until something changes them."""

    def __init__(self, rows: int, max_blocks: int) -> None:
        super().__init__(rows, max_blocks)
        self._decoding: Rows | None = None
        self._prefilling: Rows | None = None

    def decode_rows(self) -> Rows:
        if self._decoding is None:
            self._decoding = super().decode_rows()
        return self._decoding

    def prefill_rows(self) -> Rows:
        if self._prefilling is None:
            decoding = self.decode_rows()
            none = len(decoding) == self.num_ready
            self._prefilling = decoding[:0] if none else super().prefill_rows()
        return self._prefilling

    def changed(self) -> None:
        """Other rows decode now, or some have ended."""
        self._decoding = self._prefilling = None

    def enter(self, sequence: Sequence, row: int, blocks: NDArray[np.int32], computed: int) -> None:
        super().enter(sequence, row, blocks, computed)
        if self.ready[row]:
            self.changed()

    def leave(self, row: int) -> NDArray[np.int32]:
        self.changed()
        return super().leave(row)
