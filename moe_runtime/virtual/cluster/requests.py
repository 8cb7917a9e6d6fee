"""Requests of a virtual cluster: what a trace says of them, and tokens that exist only where somebody looks.

Equal hash ids mean equal tokens, as in a replay; which tokens does not matter. Generated tokens are 0 where
somebody looks, but those of a request are found in no other's prefix.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.counted import CountedScheduler
from moe_runtime.scheduler.prefix import PrefixCache
from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.spec.requests import Request, SamplingParams

I32 = NDArray[np.int32]
OWN = 1 << 30  # tokens of prompts that share nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRequest:
    """One request.

    index          line of the trace, from 0; no two requests have the same
    at             seconds after the start of the simulation
    input_length   prompt tokens
    output_length  tokens to generate
    hash_ids       one per block of the prompt; equal ids mean equal tokens. Empty: a prompt of its own
    block_tokens   tokens of such a block; may be fractional
    rank           index of the rank that it has to enter at, of those that take requests; None: any
    """

    index: int
    at: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: float = 512.0
    rank: int | None = None


class Tokens:
    """Token ids of a prompt and of what is generated after it, made when they are read.

    Stands for the int32 arrays of requests and sequences. Reading a slice makes an array; writing a
    generated token changes nothing. `chains` names, for each block of the prompt, all ids up to it; without
    them the prompt shares nothing.
    """

    __slots__ = ("_block", "_chains", "_ids", "_length", "_prompt", "_request")

    def __init__(
        self, request: int, ids: Items[int], chains: Items[int], block: float, prompt: int, length: int
    ) -> None:
        self._request, self._ids, self._chains, self._block = request, ids, chains, block
        self._prompt, self._length = prompt, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> I32: ...

    def __getitem__(self, key: int | slice) -> int | I32:
        if not isinstance(key, slice):
            place = key + self._length if key < 0 else key
            return 0 if place >= self._prompt else self._ids[self._id_at(place)]
        start, stop, _ = key.indices(self._length)
        if stop <= start:
            return np.zeros(0, np.int32)
        if start >= self._prompt:
            return np.zeros(stop - start, np.int32)
        if stop <= self._prompt:
            first = self._id_at(start)
            if first == self._id_at(stop - 1):
                return np.full(stop - start, self._ids[first], np.int32)
        return self._mixed(start, stop)

    def __setitem__(self, key: int, value: int) -> None:
        assert value == 0, "generated tokens are 0"
        assert key >= self._prompt, "the prompt is what it is"

    def with_output(self, count: int) -> "Tokens":
        """The prompt and `count` tokens after it."""
        length = self._prompt + count
        return Tokens(self._request, self._ids, self._chains, self._block, self._prompt, length)

    def key(self, end: int) -> int:
        """Names the first `end` tokens: equal for two requests where the tokens are, else not."""
        if end > self._prompt or not self._chains:
            return self._request << 32 | end
        return -(self._chains[self._id_at(end - 1)] << 32 | end)

    def keys(self, first: int, end: int, unit: int) -> list[int]:
        """`key` of the ends of units `first` to `end` - 1, each of `unit` tokens."""
        ends = range((first + 1) * unit, (end + 1) * unit, unit)
        if (first + 1) * unit > self._prompt or not self._chains:
            own = self._request << 32
            return [own | end for end in ends]
        return [self.key(end) for end in ends]

    def _id_at(self, place: int) -> int:
        # Blocks may be fractional, and rounding may add a token after the last one.
        return min(int(place / self._block), len(self._ids) - 1)

    def _mixed(self, start: int, stop: int) -> I32:
        tokens = np.zeros(stop - start, np.int32)
        inside = min(stop, self._prompt) - start
        if inside > 0:
            block = ((start + np.arange(inside)) / self._block).astype(np.int64)
            ids = np.asarray(self._ids, np.int32)
            tokens[:inside] = ids[np.minimum(block, len(ids) - 1)]
        return tokens


class Requests:
    """Makes requests and sequences of what a trace says; equal hash ids get equal tokens."""

    def __init__(self) -> None:
        self._token_of: dict[int, int] = {}
        self._chain_of: dict[tuple[int, float], int] = {}

    def request(self, virtual: VirtualRequest) -> Request:
        """The request, its prompt made of tokens that are never stored."""
        ids: Items[int] = [self._token_of.setdefault(i, len(self._token_of) + 1) for i in virtual.hash_ids]
        block, length = virtual.block_tokens, virtual.input_length
        if not ids:
            ids, block = (OWN + virtual.index,), float(max(1, length))
        tokens = Tokens(virtual.index, ids, self._chains(virtual), block, length, length)
        prompt = cast("list[int]", tokens)
        sampling = SamplingParams(max_tokens=virtual.output_length, ignore_eos=True)
        return Request(id=virtual.index, prompt=prompt, sampling=sampling)

    def _chains(self, virtual: VirtualRequest) -> list[int]:
        """A number for every beginning of the hash ids, the same for equal ones of equally large blocks."""
        chain, chains, known = self._chain((-1, virtual.block_tokens)), [], self._chain_of
        for hash_id in virtual.hash_ids:
            chain = known.get((chain, hash_id)) or self._chain((chain, hash_id))
            chains.append(chain)
        return chains

    def _chain(self, link: tuple[int, float]) -> int:
        return self._chain_of.setdefault(link, len(self._chain_of) + 1)


class VirtualPrefix(PrefixCache):
    """Finds what a PrefixCache would, by the tokens' own names instead of hashes of them."""

    def find(self, sequence: Sequence) -> list[int]:
        if not self.enabled:
            return []
        tokens, unit = cast("Tokens", sequence.tokens), self.unit_tokens
        return self._pool.find(tokens.key(end) for end in range(unit, sequence.num_known, unit))

    def keep(self, sequence: Sequence, blocks: I32, num_computed: int) -> None:
        known = sequence.num_known
        complete = num_computed if num_computed < known else known
        if complete < sequence.keep_at:
            return
        tokens: Any = sequence.tokens  # always Tokens
        unit, first = self.unit_tokens, sequence.kept_blocks
        end = complete // unit
        if end == first + 1:
            self._pool.keep(int(blocks[first]), tokens.key(end * unit))
        else:
            self._pool.keep_all(blocks[first:end].tolist(), tokens.keys(first, end, unit))
        sequence.kept_blocks, sequence.keep_at = end, (end + 1) * unit


class VirtualScheduler(CountedScheduler):
    """A CountedScheduler of virtual requests; a block is hashed by itself."""

    prefix_type = VirtualPrefix
    finds_generated = False


def make_virtual_sequence(request: Request, *, handoff: bool = False, transferred: bool = False) -> Sequence:
    """As `make_sequence`, without making the tokens. `transferred`: it was prefilled elsewhere."""
    prompt = cast("Tokens", request.prompt)
    length = len(prompt)
    return Sequence(
        request=request,
        tokens=cast("I32", prompt.with_output(request.sampling.max_tokens)),
        num_known=length + transferred,
        stop_tokens=frozenset(),
        handoff=handoff,
        transferred=transferred,
        high_water=length if transferred else 0,
    )
