"""Latency of step agreement over a tree of node leaders: many torch-free processes on loopback.

Each process is the leader of one node and stands for `--ranks` local ranks, whose proposal vectors
are its block. Per step every leader needs the blocks of all: 2 * depth hops of TCP. The machine's own
noise is measured in the same run, twice: how late a leader wakes from the pause before each step, and
how long a token of the same size takes for the same number of hops, alone, through processes like these.

Prints one JSON line; microseconds as p50, p90, p99 and largest over the steps:
  first_to_last      from the first leader's start to the last one's end: late starters included
  after_last_start   from the last leader's start to its end: what the exchange itself takes
  hops_alone, hop    the token's way, and a hop of it
  wake_up            a leader's oversleeping
  p99_beyond_hops_us after_last_start less hops_alone, at p99: to be at most 1000 (`--check`)
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_runtime.engine.agree import AgreeLimits, StepProposal, agree, vector_words  # noqa: E402
from moe_runtime.engine.node_tree import NodeTree, TreeShape  # noqa: E402

TARGET_US = 1000.0
LIMITS = AgreeLimits(max_batch_tokens=512, chunk_tokens=256, dispatch_max_tokens=512)


def proposal(rank: int, step: int, num_ranks: int) -> StepProposal:
    """A rank that is sometimes idle."""
    return StepProposal(
        decode_tokens=(rank * 7 + step) % 5 * 8,
        prefill_tokens=0,
        in_flight=0,
        stop=False,
        placement_epoch=0,
        membership_epoch=0,
        alive=(True,) * num_ranks,
    )


def leader(node: int, shape: TreeShape, ranks: int, steps: int, pause: float, pipe: Connection) -> None:
    """One node: all steps, then its times and a digest of its decisions."""
    total = shape.num_nodes * ranks
    words = vector_words(total)
    tree = NodeTree(node, shape, block_bytes=ranks * words * 8, timeout=60.0)
    pipe.send(tree.listen())
    tree.connect(pipe.recv())
    seconds, overslept, decisions = np.zeros(steps), np.zeros(steps), []
    for step in range(steps):
        lay_down = time.perf_counter()
        time.sleep(pause)
        overslept[step] = time.perf_counter() - lay_down - pause
        own = np.stack([proposal(node * ranks + r, step, total).to_vector() for r in range(ranks)])
        began = time.perf_counter()
        gathered = tree.allgather(step, own.tobytes())
        seconds[step] = time.perf_counter() - began
        if step % 50 == 0:
            vectors = np.frombuffer(gathered.blocks, np.int64).reshape(shape.num_nodes, ranks, words)
            vectors = vectors[np.argsort(gathered.order)].reshape(total, words)
            decisions.append(repr(agree([StepProposal.from_vector(v, total) for v in vectors], LIMITS)))
    pipe.send((seconds, overslept, decisions))
    tree.close()


def exchange(nodes: int, ranks: int, steps: int, pause: float) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [nodes, steps] of exchanges and of oversleeping; raises if leaders decided differently."""
    shape = TreeShape(nodes)
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for node in range(nodes):
        mine, theirs = context.Pipe()
        process = context.Process(target=leader, args=(node, shape, ranks, steps, pause, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    addresses = [p.recv() for p in pipes]
    for p in pipes:
        p.send(addresses)
    answers = [p.recv() for p in pipes]
    for process in processes:
        process.join(30)
    if any(a[2] != answers[0][2] for a in answers):
        raise RuntimeError("leaders decided differently")
    return np.array([a[0] for a in answers]), np.array([a[1] for a in answers])


def relay(pipe_in: Connection, pipe_out: Connection, steps: int) -> None:
    for _ in range(steps):
        pipe_out.send_bytes(pipe_in.recv_bytes())


def token_hops(hops: int, steps: int, pause: float, num_bytes: int) -> np.ndarray:
    """Seconds [steps] of a message of `num_bytes` through `hops` processes and back here."""
    context = mp.get_context("spawn")
    ends = [context.Pipe() for _ in range(hops + 1)]
    processes = [
        context.Process(target=relay, args=(ends[i][1], ends[i + 1][0], steps), daemon=True)
        for i in range(hops)
    ]
    for process in processes:
        process.start()
    time.sleep(2)
    seconds, payload = np.zeros(steps), bytes(num_bytes)
    for step in range(steps):
        time.sleep(pause)
        began = time.perf_counter()
        ends[0][0].send_bytes(payload)
        ends[hops][1].recv_bytes()
        seconds[step] = time.perf_counter() - began
    for process in processes:
        process.join(10)
    return seconds


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    p50, p90, p99, most = np.percentile(seconds, [50, 90, 99, 100]) * 1e6
    return {
        "p50_us": round(p50, 1),
        "p90_us": round(p90, 1),
        "p99_us": round(p99, 1),
        "max_us": round(most, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=8, help="local ranks that each leader stands for")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause-ms", type=float, default=20.0, help="a step's computation")
    parser.add_argument("--check", action="store_true", help="exit with 1 above the target")
    a = parser.parse_args()
    hops = 2 * TreeShape(a.nodes).depth
    warm = a.steps // 10
    # A step is over when the slowest leader has everything; what it waits for late starters is not ours,
    # so the time counts from the last leader's start: the smallest of the leaders' own times.
    seconds, overslept = (s[:, warm:] for s in exchange(a.nodes, a.ranks, a.steps + warm, a.pause_ms / 1e3))
    noise = token_hops(
        hops, a.steps, a.pause_ms / 1e3, a.nodes * a.ranks * vector_words(a.nodes * a.ranks) * 8
    )
    whole, last = percentiles(seconds.max(0)), percentiles(seconds.min(0))
    alone = percentiles(noise)
    beyond = round(last["p99_us"] - alone["p99_us"], 1)
    print(
        json.dumps(
            {
                "nodes": a.nodes,
                "ranks": a.nodes * a.ranks,
                "hops": hops,
                "first_to_last": whole,
                "after_last_start": last,
                "hops_alone": alone,
                "hop": percentiles(noise / max(1, hops)),
                "wake_up": percentiles(overslept.ravel()),
                "p99_beyond_hops_us": beyond,
                "cores": os.cpu_count(),
                "machine": platform.processor() or platform.machine(),
            }
        )
    )
    if a.check and beyond > TARGET_US:
        sys.exit(1)


if __name__ == "__main__":
    main()
