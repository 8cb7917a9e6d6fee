"""Sets of rank processes for transport tests: started once per test, with a deadline, always reaped."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from moe_runtime.shared_memory import Window, WindowAddress

CONTEXT = multiprocessing.get_context("forkserver")
# Torch is loaded once, by the server that ranks are forked from.
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "moe_runtime.expert_parallel.shm"])


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank raised: the class, its message, the traceback."""

    kind: str
    message: str
    trace: str


class Rank:
    """What a rank process is given: its number, a folder to meet the others in."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder
        self._windows: list[Window] = []

    def share_window(self, name: str, create: Callable[[], Window]) -> WindowAddress:
        """COLLECTIVE: rank 0 creates a window and everybody gets its address."""
        path = self.folder / name
        if self.rank == 0:
            window = create()
            self._windows.append(window)
            text = f"{window.address.pid} {window.address.fd} {window.size}"
            path.with_suffix(".tmp").write_text(text)
            path.with_suffix(".tmp").rename(path)
        while not path.exists():
            time.sleep(0.001)
        pid, fd, size = (int(word) for word in path.read_text().split())
        return WindowAddress(pid=pid, fd=fd, size=size)

    def drop_windows(self) -> None:
        """LOCAL: close the windows this rank created; every rank must have opened them."""
        for window in self._windows:
            window.close()
        self._windows.clear()

    def join_gloo(self, timeout: float = 60.0) -> None:
        """COLLECTIVE: the default process group."""
        store = FileStore(str(self.folder / "store"), self.num_ranks)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=timedelta(seconds=timeout),
        )


class World:
    """`num_ranks` processes that run `work(rank, *args)`; its result per rank comes from `results`."""

    def __init__(self, folder: Path, num_ranks: int, work: Callable[..., Any], *args: Any) -> None:
        folder.mkdir(exist_ok=True)
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(num_ranks):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_main, args=(theirs, rank, num_ranks, folder, work, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # stopped ones too
            process.join()

    def results(self, ranks: list[int] | None = None, *, deadline: float = 120.0) -> list[Any]:
        """What `ranks` (all by default) returned, or a Failure. Fails at the deadline."""
        wanted = {self._pipes[r]: r for r in (range(len(self._pipes)) if ranks is None else ranks)}
        found: dict[int, Any] = {}
        end = time.monotonic() + deadline
        while wanted:
            ready = wait(list(wanted), timeout=max(0.0, end - time.monotonic()))
            assert ready, f"ranks {sorted(wanted.values())} did not finish in {deadline:.0f} s"
            for pipe in [p for p in wanted if p in ready]:
                rank = wanted.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    found[rank] = Failure("EOFError", f"rank {rank} ended without a result", "")
        return [found[r] for r in sorted(found)]


def run_world(
    folder: Path, num_ranks: int, work: Callable[..., Any], *args: Any, deadline: float = 120.0
) -> list[Any]:
    """Run `work` on every rank; the results in rank order. Fails with what any rank raised."""
    with World(folder, num_ranks, work, *args) as world:
        results = world.results(deadline=deadline)
    failures = [f"rank {r}: {f.trace or f.message}" for r, f in enumerate(results) if isinstance(f, Failure)]
    assert not failures, "\n".join(failures)
    return results


def _main(
    pipe: Connection, rank: int, num_ranks: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        result = work(Rank(rank, num_ranks, folder), *args)
    except Exception as error:  # noqa: BLE001 - reported to the test
        trace = "".join(traceback.format_exception(error))
        result = Failure(type(error).__name__, str(error), trace)
    pipe.send(result)
    pipe.close()
    if dist.is_initialized() and not isinstance(result, Failure):
        dist.destroy_process_group()
    os._exit(0)
