"""Ranks that stop or die in the middle of a transfer: what the others raise, and after how long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_runtime.errors import PeerLost, StepTimeout
from tests.expert_parallel.world import Failure, World


@contextmanager
def timed() -> Iterator[None]:
    """Errors that name ranks waited for also say the seconds spent in here, for `seconds_waited`."""
    began = time.monotonic()
    try:
        yield
    except (StepTimeout, PeerLost) as error:
        error.args = (f"{error} [{time.monotonic() - began:.3f}]",)
        raise


def seconds_waited(failure: Failure) -> float:
    """What `timed` has noted."""
    return float(failure.message.rsplit("[", 1)[1].rstrip("]"))


def failures_without_rank_2(
    folder: Path, work: Callable[..., Any], number: int, timeout: float
) -> list[Failure]:
    """What the others of four ranks raise in `work(rank, number, timeout)`, where rank 2 gets the signal."""
    with World(folder, 4, work, number, timeout) as world:
        results = world.results([0, 1, 3], deadline=timeout + 20)
    assert all(isinstance(r, Failure) for r in results)
    return results
