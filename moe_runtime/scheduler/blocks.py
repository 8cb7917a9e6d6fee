"""BlockPool: which KV blocks of one group are free, in use, or held under a lease.

Knows block indices only: no tensors, no sequences. `free + used == total` at every step.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """A pool of `total` blocks; indices are handed out lowest-recently-freed last (a stack)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._used = np.zeros(total, bool)
        self._freed: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return int(self._used.sum())

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> NDArray[np.int32]:
        """int32 [count] block indices; the caller has asked `can_allocate`."""
        assert self.can_allocate(count), f"{count} blocks asked, {len(self._free)} free"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        self._used[taken] = True
        self._freed.difference_update(taken)
        return np.array(taken[::-1], np.int32)

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Freeing a block twice is our own bug."""
        for block in blocks:
            assert self._used[block], f"block {block} freed twice"
            self._used[block] = False
            self._free.append(int(block))
            self._freed.add(int(block))

    def take_freed(self) -> list[int]:
        """Blocks freed since the last call and not handed out again (tests poison them)."""
        freed, self._freed = sorted(self._freed), set()
        return freed

    def check(self) -> None:
        """Assert the pool's invariant."""
        assert self.num_free + self.num_used == self.total, (self.num_free, self.num_used, self.total)
