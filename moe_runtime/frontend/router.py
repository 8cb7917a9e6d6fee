"""Which rank gets a request: by outstanding tokens, prefix affinity and room in the KV cache.

Pure: no sockets, no clock. What is in flight counts from the moment it is sent, so a burst
spreads out even when no rank has answered yet.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.errors import RequestRefused

AFFINITY_TOKENS = 256
REMEMBERED_PREFIXES = 16384


@dataclass(frozen=True, slots=True)
class Target:
    """A rank that takes requests of one role."""

    instance: str
    rank: int


class Router:
    """The load of each target of one role (prefill, decode or unified), in tokens.

    A load is prompt and requested output tokens: those this frontend sent and has not seen the end
    of, and those of other frontends as of the rank's newest status.
    """

    def __init__(
        self, targets: list[Target], *, kv_tokens: int | None = None, affinity_tokens: int = AFFINITY_TOKENS
    ) -> None:
        """`kv_tokens`: what the KV cache of each target holds; None: no limit.

        `affinity_tokens` 0: prefixes do not matter, as where prompts are not computed.
        """
        self.targets = targets
        self._kv_tokens = kv_tokens
        self._affinity_tokens = affinity_tokens
        self._outstanding: NDArray[np.int64] = np.zeros(len(targets), np.int64)
        self._others: NDArray[np.int64] = np.zeros(len(targets), np.int64)
        self._down: NDArray[np.bool_] = np.zeros(len(targets), np.bool_)
        self._homes: OrderedDict[bytes, list[int]] = OrderedDict()

    def assign(self, tokens: int, *, prompt: Sequence[int] = (), rank: int | None = None) -> int:
        """The index of the target for a request; `tokens` count there until `finished`.

        With `rank`, an index into `targets`, that one. Otherwise a target that has seen the first
        `affinity_tokens` of `prompt`, unless its load is over twice the mean or its cache has no
        room; otherwise the least loaded with room, ties to the lower index.

        Raises RequestRefused if the rank does not exist, or no rank is up.
        """
        index = self._choose(tokens, prompt) if rank is None else self._named(rank)
        self._outstanding[index] += tokens
        return index

    def finished(self, index: int, tokens: int) -> None:
        """Tokens that were assigned to the target are done (or given up)."""
        self._outstanding[index] -= tokens
        assert self._outstanding[index] >= 0, "more tokens finished than were assigned"

    def observe(self, index: int, *, others_tokens: int) -> None:
        """What other frontends have at the target, as its newest status says."""
        self._others[index] = others_tokens

    def set_down(self, index: int, *, down: bool) -> None:
        """A target that is down gets nothing new; its prefixes find another home."""
        self._down[index] = down

    @property
    def outstanding(self) -> list[int]:
        """Tokens this frontend has at each target."""
        return [int(n) for n in self._outstanding]

    # -- inside -------------------------------------------------------------------------------

    def _named(self, rank: int) -> int:
        if not 0 <= rank < len(self.targets):
            raise RequestRefused(f"rank {rank} was asked for, ranks are 0 to {len(self.targets) - 1}")
        if self._down[rank]:
            raise RequestRefused(f"rank {rank} was asked for, it is down")
        return rank

    def _choose(self, tokens: int, prompt: Sequence[int]) -> int:
        up = np.flatnonzero(~self._down)
        if not len(up):
            raise RequestRefused("no rank is up")
        load = self._outstanding + self._others
        roomy = up if self._kv_tokens is None else up[load[up] + tokens <= self._kv_tokens]
        homes = self._homes_of(prompt)
        mean = float(load[up].mean())
        for index in homes:
            if index in roomy and load[index] <= 2 * mean:
                return index
        candidates = roomy if len(roomy) else up
        index = int(candidates[np.argmin(load[candidates])])
        if index not in homes:
            homes.append(index)
        return index

    def _homes_of(self, prompt: Sequence[int]) -> list[int]:
        """Targets that have computed the prefix, in the order they got it; a new list for a new one."""
        if not self._affinity_tokens or len(prompt) < self._affinity_tokens:
            return []
        prefix = np.asarray(prompt[: self._affinity_tokens], np.int32).tobytes()
        key = hashlib.blake2b(prefix, digest_size=16).digest()
        homes = self._homes.setdefault(key, [])
        self._homes.move_to_end(key)
        if len(self._homes) > REMEMBERED_PREFIXES:
            self._homes.popitem(last=False)
        return homes
