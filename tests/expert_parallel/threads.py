"""Ranks as threads of this process: cheap, where what is tested needs no processes."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any


def run_threads(works: Sequence[Callable[[], Any]], *, deadline: float = 60.0) -> list[Any]:
    """What every work returns, each on a thread of its own; the first error of any is raised here."""
    results: list[Any] = [None] * len(works)
    errors: list[tuple[float, BaseException]] = []

    def one(rank: int) -> None:
        try:
            results[rank] = works[rank]()
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            errors.append((time.monotonic(), error))

    threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(len(works))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    alive = [r for r, t in enumerate(threads) if t.is_alive()]
    assert not alive, f"ranks {alive} did not finish within {deadline} s"
    if errors:
        raise min(errors, key=lambda e: e[0])[1]
    return results
