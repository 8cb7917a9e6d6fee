"""Events of the double: what an asynchronous call leaves behind, to be waited for.

Until then its outputs hold garbage that shows: NaN, and ids no expert has.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.expert_parallel.deepep.double.contracts import require

_GARBAGE_INTEGER = -(2**30)


class DoubleEvent:
    """As DeepEP's EventOverlap: `current_stream_wait` completes the call. Waiting twice is harmless."""

    def __init__(self, complete: Callable[[], None] | None = None, *, recorded: bool = True) -> None:
        self._complete, self._recorded = complete, recorded

    def current_stream_wait(self, release_handle: bool = False) -> None:
        require(self._recorded, "the call was not asynchronous: its event is empty")
        self.finish()

    def finish(self) -> None:
        """What the communication stream does before it starts anything that follows."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()


def after(previous: DoubleEvent | None) -> None:
    """A call that names an event starts when that event has happened."""
    if previous is not None:
        previous.finish()


def outcome(complete: Callable[[], None], asynchronous: bool) -> DoubleEvent:
    """The event of a call: completed now, or when it is waited for."""
    if asynchronous:
        return DoubleEvent(complete)
    complete()
    return DoubleEvent(recorded=False)


def garbage(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What uninitialised memory may hold at its worst."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan if dtype.is_floating_point else _GARBAGE_INTEGER, dtype=dtype)
