"""BlockPool: which KV blocks of one group are free, held, or free but worth keeping.

Knows block indices and opaque keys only: no tensors, no tokens, no sequences.

A block is *held* by any number of holders (sequences, leases); a held block is used, all others are
free, so `free + used == total` at every step. A free block with a key is *idle*: its content is still
good and may be shared again until the block is needed for something else, the longest idle first.
Only complete blocks get keys and a complete block is never written again, so sharing needs no copies.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """A pool of `total` blocks. Blank blocks are handed out first, then idle ones are evicted."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._blank = list(range(total - 1, -1, -1))
        # Single blocks are counted in the array, all of them together through the view of it.
        self._holders = array("i", bytes(4 * total))
        self._all_holders = np.frombuffer(self._holders, np.int32)
        self._key_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._stale: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, idle ones among them."""
        return len(self._blank) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Free blocks whose content may be shared again."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return int(np.count_nonzero(self._all_holders))

    @property
    def num_holds(self) -> int:
        """Sum over the blocks of their holders."""
        return int(self._all_holders.sum())

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self, count: int) -> NDArray[np.int32]:
        """int32 [count] block indices with one holder each; the caller has asked `can_allocate`."""
        assert self.can_allocate(count), f"{count} blocks asked, {self.num_free} free"
        blank = self._blank
        rest = max(0, len(blank) - count)
        taken = blank[rest:][::-1]
        del blank[rest:]
        taken += [self._evict() for _ in range(count - len(taken))]
        blocks = np.array(taken, np.int32)
        self._all_holders[blocks] = 1
        return blocks

    def allocate_one(self) -> int:
        """A block with one holder; the caller has asked `can_allocate`."""
        block = self._blank.pop() if self._blank else self._evict()
        self._holders[block] = 1
        return block

    def free(self, blocks: Sequence[int] | NDArray[np.int32]) -> None:
        """One holder fewer for each block, given in token order. Freeing a free block is our own bug.

        The ends of a prefix go idle before its beginning, so they are evicted first.
        """
        order = blocks.tolist() if isinstance(blocks, np.ndarray) else blocks
        holders, key_of, idle = self._holders, self._key_of, self._idle
        for block in reversed(order):
            held = holders[block] - 1
            assert held >= 0, f"block {block} freed twice"
            holders[block] = held
            if held:
                continue
            if block in key_of:
                idle[block] = None
            else:
                self._blank.append(block)
                self._stale.add(block)

    # -- sharing ------------------------------------------------------------------------------

    def keep(self, block: int, key: Hashable) -> None:
        """The held block is complete and `key` names its content; an equal block is not kept twice."""
        assert self._holders[block] > 0, f"block {block} is not held"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def keep_all(self, blocks: Iterable[int], keys: Iterable[Hashable]) -> None:
        """As `keep` of each block."""
        holders, block_of, key_of = self._holders, self._block_of, self._key_of
        for block, key in zip(blocks, keys, strict=True):
            assert holders[block] > 0, f"block {block} is not held"
            if key not in block_of and block not in key_of:
                block_of[key] = block
                key_of[block] = key

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """The blocks of the leading keys that are kept."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free now: sharing them takes that many from `num_free`."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One holder more for each block that `find` returned."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def forget(self) -> None:
        """Contents are out of date: nothing is found any more, and idle blocks are blank."""
        self._blank.extend(self._idle)
        self._stale.update(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

    # -- checks -------------------------------------------------------------------------------

    def take_stale(self) -> list[int]:
        """Blocks whose content became nobody's since the last call, handed out again or not.

        Tests poison them: after `allocate` and before anything is written.
        """
        stale, self._stale = sorted(self._stale), set()
        return stale

    def check(self) -> None:
        """Assert the pool's invariants."""
        assert self.num_free + self.num_used == self.total, (self.num_free, self.num_used, self.total)
        assert len(self._key_of) == len(self._block_of), "a key names two blocks"

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self._stale.add(block)
        return block
