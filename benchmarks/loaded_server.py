"""A server of two ranks and the load of a trace, for serving_load.py: what it is asked, and what came of it.

Owns the server's process and plan, the requests of the trace at rates of one's choice, and the arithmetic of
their records. Knows no figure and no target.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from moe_runtime.frontend.http_client import HttpFailure, Server, request
from moe_runtime.frontend.http_replay import Instances, replay_http
from moe_runtime.frontend.replay import Arrival
from moe_runtime.frontend.trace import TraceRequest
from moe_runtime.report.outcomes import outcome
from moe_runtime.report.records import RequestRecord
from moe_runtime.spec.requests import SamplingParams

PORT = 18431
SEQUENCES = 8
PATIENT_MS = 1e6  # an objective with which nothing is refused
READY_SECONDS = 180
NAMES = Instances(prefill="unified-0", decode="unified-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all phases have in common. `requests` are those of the trace, scaled, with their prompts."""

    checkpoint: Path
    folder: Path
    out: IO[str]
    seconds: float
    rounds: int
    ttft_ms: float
    requests: Sequence[TraceRequest]
    prompts: Sequence[list[int]]

    def write(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, **fields}
        for stream in (self.out, sys.stdout):
            stream.write(json.dumps(line) + "\n")
            stream.flush()

    @contextmanager
    def server(
        self, *, tpot_ms: float, ttft_ms: float = PATIENT_MS, prefix_cache: bool = True
    ) -> Iterator[Server]:
        """A server with these objectives, ready."""
        plan = {
            "model": {"path": str(self.checkpoint), "dtype": "float32"},
            "deployments": {
                "unified": {
                    "expert_parallel": 2,
                    "scheduler": {"max_sequences": SEQUENCES, "chunk_budget": "tpot"},
                    "kv_cache": {"blocks": 2048, "prefix_cache": prefix_cache},
                }
            },
            "server": {"port": PORT},
            "slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
        }
        path = self.folder / "plan.yaml"
        path.write_text(yaml.safe_dump(plan))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / "server.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "moe_runtime", "serve", str(path)], env=env, stdout=log, stderr=log
            )
            try:
                server = Server.of(f"http://127.0.0.1:{PORT}")
                asyncio.run(_ready(server, process, Path(log.name)))
                yield server
            finally:
                process.terminate()
                process.wait(60)

    def arrivals(self, rate: float, seconds: float, every: int = 1) -> list[Arrival]:
        """Requests of the trace at its own times, so stretched that `rate` come per second.

        Of `every` consecutive ones, the first.
        """
        count = min(len(self.requests) // every, max(8, round(rate * seconds)))
        at = spread([r.arrival for r in self.requests[: count * every]])[::every]
        stretch = count / rate / max(at[-1], 1e-9)
        return [self.arrival(i * every, at[i] * stretch) for i in range(count)]

    def arrival(self, i: int, at: float, output: int | None = None) -> Arrival:
        """Request i of the trace, at another time; `output` tokens instead of its own."""
        tokens = self.requests[i].output_length if output is None else output
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return Arrival(index=i, at=at, prompt=self.prompts[i], sampling=params)


async def _ready(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()}")
        try:
            async with request(server, "GET", "/ready") as answer:
                if answer.status == 200:
                    return
        except HttpFailure:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the server was not ready after {READY_SECONDS} s")


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds used so far: by this process, by its children and theirs, by everything on the host."""

    at: float
    client: float
    server: float
    host: float

    @classmethod
    def now(cls) -> "CpuUse":
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        return cls(
            time.monotonic(),
            time.process_time(),
            sum(map(_ticks, _descendants(os.getpid()))) / tick,
            (user + nice + system + irq + softirq) / tick,
        )

    def since(self, before: "CpuUse") -> dict[str, float]:
        """Cores in use on average since then."""
        seconds = self.at - before.at
        client, server = self.client - before.client, self.server - before.server
        others = max(0.0, self.host - before.host - client - server)
        used = {"client": client, "server": server, "others": others}
        return {name: round(value / seconds, 3) for name, value in used.items()}


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _descendants(child)


def _ticks(pid: int) -> int:
    """User and system time of a process."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


def spread(times: Sequence[float]) -> list[float]:
    """Equal times spread evenly until the next other one: traces are often rounded to seconds."""
    values, first, counts = np.unique(np.asarray(times), return_index=True, return_counts=True)
    gaps = np.append(np.diff(values), np.diff(values).mean() if len(values) > 1 else 1.0)
    out = np.empty(len(times))
    for value, start, count, gap in zip(values, first, counts, gaps, strict=True):
        out[start : start + count] = value + gap * np.arange(count) / count
    return out.tolist()


def sharing(requests: Sequence[TraceRequest]) -> list[int]:
    """Requests whose first half, two blocks at least, also begins an earlier one, each group after the
    one it follows from: what a server sees that has run the trace for long, in little time.
    """
    first: dict[tuple[int, int], int] = {}  # (node of the prefix, next block) -> node; 0 is the empty prefix
    owner: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for i, r in enumerate(requests):
        node, path = 0, []
        for block in r.hash_ids:
            node = first.setdefault((node, block), len(first) + 1)
            path.append(node)
        depth = max(2, len(path) // 2)
        root = owner.get(path[depth - 1], i) if len(path) >= depth else i
        groups.setdefault(root, []).append(i)
        for node in path:
            owner.setdefault(node, root)
    return [i for group in groups.values() if len(group) > 1 for i in group]


def replay(server: Server, arrivals: Sequence[Arrival], model: str) -> list[RequestRecord]:
    return asyncio.run(replay_http(server, arrivals, model=model, instances=NAMES))


def closed_loop(
    bench: Bench, server: Server, indices: Sequence[int], *, clients: int, seconds: float, output: int | None
) -> tuple[list[RequestRecord], float]:
    """So many clients, each of which sends the next request when it has its answer; (records, seconds)."""
    model, records, pending = bench.checkpoint.name, [], iter(indices)

    async def client(end: float) -> None:
        for i in pending:
            arrival = bench.arrival(i, 0.0, output)
            (record,) = await replay_http(server, [arrival], model=model, instances=NAMES)
            records.append(record)
            if time.monotonic() > end:
                return
            if not outcome(record).finished:
                await asyncio.sleep(1.0)  # told to come back later

    async def all_clients() -> float:
        start = time.monotonic()
        await asyncio.gather(*(client(start + seconds) for _ in range(clients)))
        return time.monotonic() - start

    taken = asyncio.run(all_clients())
    return records, taken


def good(records: Sequence[RequestRecord], ttft_ms: float, tpot_ms: float) -> int:
    """Requests that finished and met both objectives."""
    return sum(
        r.finished and r.ttft * 1e3 <= ttft_ms and (r.tpot or 0.0) * 1e3 <= tpot_ms
        for r in map(outcome, records)
    )


def gaps_ms(records: Sequence[RequestRecord]) -> np.ndarray:
    """Gaps between consecutive tokens of finished requests."""
    found = [np.diff(np.asarray(r.token_times)) for r in records if outcome(r).finished]
    return 1e3 * np.concatenate(found) if found else np.zeros(0)


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"p{p}": round(float(np.percentile(values, p)), 2) for p in (50, 90, 99)}
