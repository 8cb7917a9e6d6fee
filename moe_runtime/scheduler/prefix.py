"""PrefixCache: KV blocks of equal token prefixes, found by a chain of hashes. Pure.

A *unit* of `unit_tokens` tokens is what is hashed and found as a whole; it is one block or several,
so hashes need not follow the page size. The hash of a unit covers all tokens before it, the model
(the key of the hash) and the request's salt, as each hash goes into the next:

    h[-1] = H(model, salt)      h[i] = H(model, h[i-1] | tokens of unit i)      H: blake2b, 128 bits

Token ids are not compared: two different prefixes collide with probability 2^-128 per pair, and
nobody can search for a collision in less than about 2^64 hashes.
"""

import hashlib
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.blocks import BlockPool
from moe_runtime.scheduler.sequences import Sequence

_HASH_BYTES = 16
NEVER = 1 << 62


class PrefixCache:
    """Finds and keeps blocks in one pool. Disabled, it finds nothing and keeps nothing."""

    def __init__(
        self, pool: BlockPool, *, block_tokens: int, unit_tokens: int, model: str, enabled: bool
    ) -> None:
        """`unit_tokens` is a multiple of `block_tokens`; `model` tells apart what must not be shared."""
        assert unit_tokens % block_tokens == 0, (unit_tokens, block_tokens)
        self.enabled = enabled
        self._pool = pool
        self.unit_tokens = unit_tokens
        self._blocks_per_unit = unit_tokens // block_tokens
        self._suffixes = [i.to_bytes(4, "little") for i in range(self._blocks_per_unit)]
        self._model = hashlib.blake2b(model.encode(), digest_size=32).digest()

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of the sequence, never all of it: a token is left to compute, and
        rows whose scores are wanted.
        """
        if not self.enabled:
            return []
        units = min(sequence.num_known - 1, sequence.next_score) // self.unit_tokens
        self._hash_until(sequence, units)
        found = self._pool.find(islice(sequence.block_keys, units * self._blocks_per_unit))
        return found[: len(found) // self._blocks_per_unit * self._blocks_per_unit]

    def admitted(self, sequence: Sequence, num_found: int) -> None:
        """The sequence got a row; its first `num_found` blocks came from the cache."""
        sequence.kept_blocks = num_found
        units = num_found // self._blocks_per_unit
        sequence.keep_at = (units + 1) * self.unit_tokens if self.enabled else NEVER

    def keep(self, sequence: Sequence, blocks: NDArray[np.int32], num_computed: int) -> None:
        """KV of `num_computed` tokens is written to `blocks`: complete units may be found from now on."""
        complete = min(num_computed, sequence.num_known)
        if complete < sequence.keep_at:
            return
        units = complete // self.unit_tokens
        self._hash_until(sequence, units)
        end = units * self._blocks_per_unit
        for index in range(sequence.kept_blocks, end):
            self._pool.keep(int(blocks[index]), sequence.block_keys[index])
        self.admitted(sequence, end)

    def _hash_until(self, sequence: Sequence, units: int) -> None:
        """Extend the sequence's keys to its first `units` units: one key per block of each."""
        have = len(sequence.block_keys) // self._blocks_per_unit
        if have >= units:
            return
        chain = sequence.prefix_hash or self._hash(sequence.request.cache_salt.encode())
        for unit in range(have, units):
            tokens = sequence.tokens[unit * self.unit_tokens : (unit + 1) * self.unit_tokens]
            chain = self._hash(chain + tokens.tobytes())
            sequence.block_keys += [chain + suffix for suffix in self._suffixes]
        sequence.prefix_hash = chain

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_HASH_BYTES, key=self._model).digest()
