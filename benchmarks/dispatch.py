#!/usr/bin/env python3
"""One dispatch + combine pair: the `shm` backend against the `torch` backend on gloo, in one run.

    python benchmarks/dispatch.py [--ranks 4 8] [--out dispatch.jsonl] [--check]

All ranks are processes of this machine with one thread each. They take turns: blocks of pairs on gloo, then
on `shm`, then plain copies, over and over, so that all meet the same machine; a figure is the median
over blocks of the time per pair of the slowest rank. Experts are left out (outputs are the rows as
they came). A plain copy moves as many bytes as the pair moves between ranks, rank by rank at once,
within private memory, out and back: what no transport through memory can undercut by much.

Also given: bytes on the wire against the least there can be (a row per token and other rank it goes to
for the dispatch, a row per pair for the combine), from the backends' own counters. Output: a JSON line
per backend and rank count, then one with the ratios.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from moe_runtime.expert_parallel.collective import CollectiveBuffer
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.expert_parallel.shm import ShmBuffer, ShmSizes
from moe_runtime.report.machine import read_commit, read_machine
from moe_runtime.shared_memory import WindowAddress

TARGETS = {4: 0.25, 8: 0.35}
DEADLINE = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a pair carries; per rank `tokens` rows of `hidden` values to `top_k` of all experts."""

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    dtype: str
    blocks: int
    pairs: int

    @property
    def slots_per_rank(self) -> int:
        return -(-self.experts // self.ranks)


class RankBench:
    """One rank: its inputs, both buffers, and how to time a block."""

    def __init__(self, rank: int, setting: Setting, window: WindowAddress, folder: Path) -> None:
        self.rank, self.setting = rank, setting
        store = FileStore(str(folder / f"store{setting.ranks}"), setting.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ranks)
        self.shm = ShmBuffer(sizes_of(setting), rank=rank, timeout=60.0)
        self.shm.connect(window)
        self.torch = CollectiveBuffer(slots_per_rank=setting.slots_per_rank, payload=Payload(setting.dtype))
        rng = torch.Generator().manual_seed(rank)
        T, K, s = setting.tokens, setting.top_k, setting
        self.x_TH = torch.randn(T, s.hidden, generator=rng)
        self.slot_ids_TK = torch.rand(T, s.experts, generator=rng).argsort(1)[:, :K].contiguous()
        self.weights_TK = torch.rand(T, K, generator=rng)

    def pair(self, buffer: ShmBuffer | CollectiveBuffer) -> torch.Tensor:
        rows = buffer.dispatch(self.x_TH, self.slot_ids_TK, self.weights_TK).wait()
        return buffer.combine(rows.values(torch.float32), rows).wait()

    def copy(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    def seconds(self, work: Callable[[], object]) -> tuple[float, float]:
        """(wall, CPU of all threads) per repetition of one block, all ranks having started together."""
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(self.setting.pairs):
            work()
        wall = time.perf_counter() - began
        return wall / self.setting.pairs, (time.process_time() - cpu) / self.setting.pairs

    def run(self) -> dict[str, Any]:
        same = torch.equal(self.pair(self.shm), self.pair(self.torch))
        self.shm.meter.take()
        self.torch.meter.take()
        self.pair(self.shm)
        self.pair(self.torch)
        moved = {"shm": self.shm.meter.take(), "torch": self.torch.meter.take()}
        sizes = [moved["shm"].bytes_dispatched, moved["shm"].bytes_combined]
        sources = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
        targets = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
        works: dict[str, Callable[[], object]] = {
            "torch": lambda: self.pair(self.torch),
            "shm": lambda: self.pair(self.shm),
            "copy": lambda: self.copy(sources, targets),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for _ in range(self.setting.blocks + 1):
            for name, work in works.items():
                seconds[name].append(self.seconds(work))
        return {
            "same": same,
            "seconds": {name: times[1:] for name, times in seconds.items()},  # the first block warms up
            "bytes": {name: (t.bytes_dispatched, t.bytes_combined) for name, t in moved.items()},
            "least": self.least_bytes(),
        }

    def least_bytes(self) -> tuple[int, int]:
        """(dispatch, combine): a row per (token, other rank), and back a row per pair elsewhere."""
        ranks_TK = self.slot_ids_TK // self.setting.slots_per_rank
        pairs = {(t, r) for t, row in enumerate(ranks_TK.tolist()) for r in row if r != self.rank}
        back = int((ranks_TK != self.rank).sum())
        row = Payload(self.setting.dtype).row_bytes(self.setting.hidden)
        return len(pairs) * row, back * 4 * self.setting.hidden


def sizes_of(setting: Setting) -> ShmSizes:
    return ShmSizes(
        num_ranks=setting.ranks,
        slots_per_rank=setting.slots_per_rank,
        hidden=setting.hidden,
        top_k=setting.top_k,
        max_tokens=setting.tokens,
        payload=Payload(setting.dtype),
        output_dtype=torch.float32,
    )


def rank_main(pipe: Connection, rank: int, setting: Setting, window: WindowAddress, folder: Path) -> None:
    torch.set_num_threads(1)
    pipe.send(RankBench(rank, setting, window, folder).run())
    dist.destroy_process_group()


def measure(setting: Setting) -> list[dict[str, Any]]:
    """What every rank reports. RuntimeError if one does not within the deadline."""
    context = multiprocessing.get_context("spawn")
    window = ShmBuffer(sizes_of(setting), rank=0, timeout=1.0).create_window()
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(setting.ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, rank, setting, window.address, Path(folder))
            processes.append(context.Process(target=rank_main, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            end = time.monotonic() + DEADLINE
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    raise RuntimeError(f"rank {rank} did not finish in {DEADLINE:.0f} s")
            return [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
                process.join()


def rows_of(setting: Setting, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per backend, and the summary."""
    if not all(r["same"] for r in reports):
        raise RuntimeError("the two backends give different results")
    medians: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name in ("torch", "shm", "copy"):
        blocks = list(zip(*(r["seconds"][name] for r in reports), strict=True))
        slowest = [max(wall for wall, _ in block) for block in blocks]
        medians[name] = statistics.median(slowest)
        figures = {
            "milliseconds": medians[name],
            "lowest": min(slowest),
            "highest": max(slowest),
            "cpu_milliseconds_of_all_ranks": statistics.median(sum(c for _, c in b) for b in blocks),
        }
        milliseconds = {k: 1e3 * v for k, v in figures.items()}
        rows.append({"benchmark": "dispatch", **asdict(setting), "backend": name, **milliseconds})
    least = [sum(r["least"][i] for r in reports) for i in (0, 1)]
    wire = {n: [sum(r["bytes"][n][i] for r in reports) for i in (0, 1)] for n in ("torch", "shm")}
    ratio, target = medians["shm"] / medians["torch"], TARGETS.get(setting.ranks)
    summary = {
        "benchmark": "dispatch",
        **asdict(setting),
        "shm_to_gloo": ratio,
        "target": target,
        "met": target is None or ratio <= target,
        "shm_to_copy": medians["shm"] / medians["copy"],
        "least_dispatch_bytes": least[0],
        "least_combine_bytes": least[1],
        **{f"{n}_dispatch_bytes_to_least": wire[n][0] / max(1, least[0]) for n in wire},
        **{f"{n}_combine_bytes_to_least": wire[n][1] / max(1, least[1]) for n in wire},
    }
    return [*rows, summary]


def main() -> int:
    parser = argparse.ArgumentParser(description="A dispatch + combine pair on shm and on gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--dtype", default="float32", help="of the rows as dispatched")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=20, help="per block")
    parser.add_argument("--out", type=Path, help="file of JSON lines to append to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is not reached")
    arguments = parser.parse_args()
    machine = read_machine(hardware="", device="cpu")
    common = {"commit": read_commit(), "machine": f"{machine.cpu_model}, {machine.cores} cores"}
    missed = 0
    for ranks in arguments.ranks:
        setting = Setting(
            ranks=ranks,
            tokens=arguments.tokens,
            hidden=arguments.hidden,
            top_k=arguments.top_k,
            experts=arguments.experts,
            dtype=arguments.dtype,
            blocks=arguments.blocks,
            pairs=arguments.pairs,
        )
        rows = rows_of(setting, measure(setting))
        missed += not rows[-1]["met"]
        for row in rows:
            write({**row, **common, "load_average": os.getloadavg()[0]}, arguments.out)
    return int(arguments.check and missed > 0)


def write(row: dict[str, Any], out: Path | None) -> None:
    """One JSON line, to the screen and to the file."""
    line = json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()})
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
