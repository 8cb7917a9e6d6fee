"""Which rank gets a request: by outstanding tokens, prefix affinity and room in the KV cache.

Pure: no sockets, no clock. What is in flight counts from the moment it is sent, so a burst
spreads out even when no rank has answered yet. What a rank has room for it says itself; what is
believed here only keeps requests from being sent where they would be turned away.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.promises import room_of
from moe_runtime.errors import NoRoom, RequestRefused

AFFINITY_TOKENS = 256
REMEMBERED_PREFIXES = 16384
HOME_LOAD, HOME_LOAD_DECODE = 2.0, 0.0


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
        self,
        targets: list[Target],
        *,
        kv_tokens: int | None = None,
        affinity_tokens: int = AFFINITY_TOKENS,
        home_load: float = HOME_LOAD,
        most_tokens: int | None = None,
        most_requests: int | None = None,
    ) -> None:
        """`kv_tokens`: what the KV cache of each target holds; None: no limit.

        `affinity_tokens` 0: prefixes do not matter. `home_load`: times the mean load up to which a target
        that has seen a prefix is preferred. `most_tokens` and `most_requests`: a target that has
        so many gets nothing more; None: no limit.
        """
        self.targets = targets
        self._kv_tokens = kv_tokens
        self._affinity_tokens = affinity_tokens
        self._home_load = home_load
        self._most = (most_tokens, most_requests)
        # Tokens and requests, [2, targets].
        self._outstanding: NDArray[np.int64] = np.zeros((2, len(targets)), np.int64)
        self._others: NDArray[np.int64] = np.zeros((2, len(targets)), np.int64)
        self._down: NDArray[np.bool_] = np.zeros(len(targets), np.bool_)
        self._up: NDArray[np.intp] = np.arange(len(targets))
        self._homes: OrderedDict[bytes, list[int]] = OrderedDict()

    def assign(
        self,
        tokens: int,
        *,
        prompt: Sequence[int] = (),
        rank: int | None = None,
        besides: Collection[int] = (),
    ) -> int:
        """The index of the target for a request; `tokens` count there until `finished`.

        With `rank`, an index into `targets`, that one. Otherwise a target that has seen the first
        `affinity_tokens` of `prompt`, unless its load is over `home_load` times the mean or its cache has no
        room; otherwise the least loaded with room, ties to the lower index. Never one of `besides`.

        Raises RequestRefused if the rank does not exist, or no rank is up; NoRoom if all that are have
        as much as they may.
        """
        if rank is not None and not 0 <= rank < len(self.targets):
            raise RequestRefused(f"rank {rank} was asked for, ranks are 0 to {len(self.targets) - 1}")
        if rank is not None and self._down[rank]:
            raise RequestRefused(f"rank {rank} was asked for, it is down")
        able = self._able(tokens, besides)
        if rank is None:
            index = self._choose(tokens, prompt, able)
        elif rank in able:
            index = rank
        else:
            raise NoRoom(f"rank {rank} was asked for, it has all it can take now")
        self._outstanding[:, index] += (tokens, 1)
        return index

    def finished(self, index: int, tokens: int) -> None:
        """Tokens that were assigned to the target are done (or given up)."""
        self._outstanding[:, index] -= (tokens, 1)
        assert self._outstanding[0, index] >= 0, "more tokens finished than were assigned"

    def observe(self, index: int, *, others_tokens: int, others_requests: int = 0) -> None:
        """What other frontends have at the target, as its newest status says."""
        self._others[:, index] = (others_tokens, others_requests)

    def full(self, index: int, *, tokens: int, requests: int) -> None:
        """The target turned a request away: so much is promised there, to all frontends."""
        self._others[:, index] = np.maximum((tokens, requests) - self._outstanding[:, index], 0)

    def set_down(self, index: int, *, down: bool) -> None:
        """A target that is down gets nothing new; its prefixes find another home."""
        self._down[index] = down
        self._up = np.flatnonzero(~self._down)

    @property
    def outstanding(self) -> list[int]:
        """Tokens this frontend has at each target."""
        return [int(n) for n in self._outstanding[0]]

    # -- inside -------------------------------------------------------------------------------

    def _able(self, tokens: int, besides: Collection[int]) -> NDArray[np.intp]:
        """Targets that are up and may take so many tokens more, as far as is known here."""
        up = self._up
        if not len(up):
            raise RequestRefused("no rank is up")
        able = np.array([i for i in up if i not in besides], np.intp) if besides else up
        load = self._outstanding + self._others
        for most, one_more, have in zip(self._most, (tokens, 1), load, strict=True):
            if most is not None:
                able = able[have[able] + one_more <= most]
        return able

    def _choose(self, tokens: int, prompt: Sequence[int], able: NDArray[np.intp]) -> int:
        if not len(able):
            raise NoRoom("every rank has all it can take now")
        load = self._outstanding[0] + self._others[0]
        roomy = able if self._kv_tokens is None else able[load[able] + tokens <= self._kv_tokens]
        homes = self._homes_of(prompt)
        mean = float(load[self._up].mean()) if homes else 0.0
        for index in homes:
            if index in roomy and load[index] <= self._home_load * mean:
                return index
        candidates = roomy if len(roomy) else able
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


def role_router(
    role: str,
    targets: list[Target],
    *,
    kv_tokens: int,
    max_sequences: int,
    bounded: bool,
    decode_affinity: bool = True,
) -> Router:
    """The router of one role, whose ranks are alike; `bounded`: no rank is sent more than it may promise.

    Decode ranks get prompts with their KV, so who has seen a prefix before matters there only if they do
    not fetch what they have (`decode_affinity`). That saves less than computing it, and in lock-step the
    fullest rank holds up all others: a home has to be idle.
    """
    room = room_of(role, kv_tokens=kv_tokens, max_sequences=max_sequences)
    return Router(
        targets,
        kv_tokens=kv_tokens,
        affinity_tokens=0 if role == "decode" and not decode_affinity else AFFINITY_TOKENS,
        home_load=HOME_LOAD_DECODE if role == "decode" else HOME_LOAD,
        most_tokens=room.tokens if bounded else None,
        most_requests=room.requests if bounded else None,
    )
