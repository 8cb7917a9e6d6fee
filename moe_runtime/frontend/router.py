"""Which rank gets a request: by outstanding tokens, counted at once, ties to the lower index.

Pure: no sockets, no clock. What is in flight counts from the moment it is sent, so a burst
spreads out even when no rank has answered yet.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Target:
    """A rank that takes requests of one role."""

    instance: str
    rank: int


class Router:
    """Outstanding tokens of each target of one role (prefill, decode or unified)."""

    def __init__(self, targets: list[Target]) -> None:
        self.targets = targets
        self._outstanding: NDArray[np.int64] = np.zeros(len(targets), np.int64)

    def assign(self, tokens: int) -> int:
        """The least loaded target; `tokens` count as outstanding there until `finished`."""
        index = int(np.argmin(self._outstanding))
        self._outstanding[index] += tokens
        return index

    def finished(self, index: int, tokens: int) -> None:
        """Tokens that were assigned to the target are done (or given up)."""
        self._outstanding[index] -= tokens
        assert self._outstanding[index] >= 0, "more tokens finished than were assigned"

    @property
    def outstanding(self) -> list[int]:
        return [int(n) for n in self._outstanding]
