"""Constraint: what the output of a sequence must look like, as sampling and the scheduler see it.

What a grammar is, whoever makes a constraint knows. V vocabulary, W = ceil(V / 32) words of a mask.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """What a sequence's output must look like, as far as it has got."""

    def accept(self, token: int) -> None:
        """The output grew by a token."""

    def mask(self) -> NDArray[np.int32]:
        """int32 [W]: bit v % 32 of word v // 32 is set where token v may come next."""
