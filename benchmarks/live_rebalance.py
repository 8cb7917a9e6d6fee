"""Live rebalancing under a shifting, skewed load: throughput, inter-token latency, and what moving costs.

Ranks are processes with the real engine, transport, mover and solver; every rank decodes the same number of
sequences all the time. Two things are doubles, so that balance matters on a small machine: the router draws
experts from the measured loads of DeepSeek-V3 (`--loads`), folded onto the model's experts and shuffled anew
for every topic; and a rank's experts take `--row-us` more for each row they receive. So a step takes about
the sum over the layers of the busiest rank's rows.

Runs, all with the same rows:
  off        linear placement, never changed
  frozen     as live until the first topic is over, then never changed
  live       rebalances by its own decisions
  hindsight  the placement solved for the whole run's load, never changed
  topic      live with one topic all the time, against off with the same one, and what the solver predicted
  pause      one topic, alternating windows with forced moves and without: p99 of the time between tokens

Prints JSON lines; `--plot F.png` draws balancedness, time between tokens and moves over time.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_runtime.checkpoint.make import make_checkpoint  # noqa: E402
from moe_runtime.engine.agree import StepKind  # noqa: E402
from moe_runtime.engine.balancing.load import step_balancedness  # noqa: E402
from moe_runtime.expert_parallel.buffer import Rows  # noqa: E402
from moe_runtime.models.families.registry import read_spec  # noqa: E402
from moe_runtime.models.moe import Experts, Route, Router  # noqa: E402
from moe_runtime.report.machine import read_commit  # noqa: E402
from tests.end_to_end.commands import write_plan  # noqa: E402
from tests.engine.balancing.live import Forced, balancing_of  # noqa: E402
from tests.engine.instance import Driven, start  # noqa: E402
from tests.expert_parallel.world import Rank, run_world  # noqa: E402

NEVER = 1 << 40
WARM_STEPS = 4  # prefill, and the first steps after it


@dataclass(frozen=True, kw_only=True)
class Load:
    """shares_PLE: of each topic; a topic lasts `steps` steps. `row_seconds`: of each row a rank receives."""

    shares_PLE: NDArray[np.float64]
    steps: int
    row_seconds: float
    sequences: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Of one rank, per step: wall seconds, rows its slots received [L], epoch, whether moves went on."""

    seconds: list[float]
    received: list[list[int]]
    epochs: list[int]
    moving: list[bool]
    moves: int
    stall_seconds: float
    aborted: int
    predicted: float | None


def folded(path: Path, experts: int, layers: int, topics: int) -> NDArray[np.float64]:
    """float64 [topics, L, E]: of each layer's sorted loads every n-th, shuffled for each topic."""
    loads_LE = np.loadtxt(path, delimiter=",", comments="#")
    rng = np.random.default_rng(0)
    rows = np.sort(loads_LE[:: max(1, len(loads_LE) // layers)][:layers], axis=1)
    step = rows.shape[1] / experts
    kept = rows[:, (np.arange(experts) * step + step - 1).astype(int)]
    kept /= kept.sum(axis=1, keepdims=True)
    return np.stack([np.stack([rng.permutation(row) for row in kept]) for _ in range(topics)])


def install(driven: Driven, load: Load) -> None:
    """The doubles of this process: the router and the time that rows take."""
    logs = torch.from_numpy(np.log(load.shares_PLE)).float()
    generator = torch.Generator().manual_seed(driven.rank.rank)
    routers = [m for m in driven.engine.decoder.modules() if isinstance(m, Router)]
    top_k = routers[0]._how["top_k"]
    layer_of = {id(router): layer for layer, router in enumerate(routers)}
    compute = Experts.forward

    def route(router: Router, h_TH: torch.Tensor) -> Route:
        topic = min(driven.engine.step_number // load.steps, len(logs) - 1)
        scores = logs[topic, layer_of[id(router)]].expand(len(h_TH), -1)
        noise = -torch.log(-torch.log(torch.rand(scores.shape, generator=generator).clamp(1e-9, 1 - 1e-7)))
        ids = (scores + noise).topk(top_k).indices  # draws without replacement
        return Route(ids, torch.full(ids.shape, 1 / top_k))

    def charged(experts: Experts, rows: Rows) -> torch.Tensor:
        until = time.monotonic() + int(rows.counts.sum()) * load.row_seconds
        y = compute(experts, rows)
        time.sleep(max(0.0, until - time.monotonic()))
        return y

    setattr(Router, "forward", route)  # noqa: B010
    setattr(Experts, "forward", charged)  # noqa: B010


@torch.inference_mode()
def work(rank: Rank, plan: Path, load: Load, steps: int, mode: str) -> Trace:
    """One rank of a run."""
    driven = start(rank, plan)
    driven.engine.warm_up()
    install(driven, load)
    balancing = balancing_of(driven)
    forced = Forced(driven, [])
    for number in range(load.sequences):
        driven.submit(number, [9, 10, 11], steps + WARM_STEPS + 8)
    while driven.engine.scheduler.num_requests < load.sequences:
        driven.engine.desk.receive()
    seconds, received, epochs, moving = [], [], [], []
    before = time.monotonic()
    while len(seconds) < steps + WARM_STEPS:
        step = driven.engine.step_number
        if mode == "frozen" and step >= load.steps:
            balancing.meter.interval_tokens = NEVER
        if mode == "pause":
            forced.on = step // PAUSE_STEPS % 2 == 1
            forced.next_target()
        was_busy = balancing.busy
        kind = driven.engine.step()
        driven.collect()
        now = time.monotonic()
        if kind is StepKind.FORWARD:
            seconds.append(now - before)
            received.append(list(driven.engine.desk.log.take().received_rows[-1]))
            epochs.append(balancing.epoch)
            moving.append(was_busy or balancing.busy)
        before = now
    predicted = balancing.controller.newest.balancedness if balancing.controller else None
    status = balancing.status(time.monotonic())
    result = Trace(
        seconds=seconds[WARM_STEPS:],
        received=received[WARM_STEPS:],
        epochs=epochs[WARM_STEPS:],
        moving=moving[WARM_STEPS:],
        moves=status.moves,
        stall_seconds=status.stall_seconds,
        aborted=status.aborted,
        predicted=predicted,
    )
    driven.close()
    return result


PAUSE_STEPS = 20


def run(folder: Path, options: argparse.Namespace, load: Load, mode: str, **balancing: Any) -> list[Trace]:
    """All ranks of a run."""
    total = load.steps * len(load.shares_PLE)
    unified = {
        "expert_parallel": options.ranks,
        "redundant_experts": options.redundant,
        "scheduler": {"max_sequences": load.sequences},
        "kv_cache": {"blocks": load.sequences * (total // 16 + 4), "prefix_cache": False},
        "overlap": {"micro_batches": 1},
        "balancing": {"enabled": True, **balancing},
    }
    path = folder / f"{mode}.{len(list(folder.glob('*.yaml')))}.yaml"
    plan = write_plan(path, folder / "model", {"unified": unified})
    return run_world(path.with_suffix(""), options.ranks, work, plan, load, total, mode, deadline=3600)


def summary(traces: list[Trace], load: Load, top_k: int) -> dict[str, Any]:
    """Throughput in decoded tokens of all ranks a second; balancedness of whole runs and of steps."""
    seconds = np.array(traces[0].seconds)
    received_RWL = np.array([t.received for t in traces])
    total_RL = received_RWL.sum(axis=1)
    return {
        "tokens_per_second": len(traces) * load.sequences * len(seconds) / seconds.sum(),
        "itl_ms_p50": 1e3 * float(np.percentile(seconds, 50)),
        "itl_ms_p99": 1e3 * float(np.percentile(seconds, 99)),
        "balancedness_steps": float(step_balancedness(received_RWL).mean()),
        "balancedness_p5": float(np.percentile(step_balancedness(received_RWL), 5)),
        "balancedness_whole": float((total_RL.mean(axis=0) / total_RL.max(axis=0)).mean()),
        "moves": sum(t.moves for t in traces),
        "epoch": traces[0].epochs[-1],
        "aborted": max(t.aborted for t in traces),
        "stall_ms_per_step": 1e3 * max(t.stall_seconds for t in traces) / len(seconds),
    }


def late(traces: list[Trace], first: int) -> float:
    """Balancedness of the rows from a step on, as one window."""
    total_RL = np.array([t.received[first:] for t in traces]).sum(axis=1)
    return float((total_RL.mean(axis=0) / total_RL.max(axis=0)).mean())


def rate(traces: list[Trace], first: int) -> float:
    """Steps a second from a step on."""
    return 1.0 / float(np.mean(traces[0].seconds[first:]))


def shifting(folder: Path, options: argparse.Namespace, load: Load, top_k: int) -> dict[str, list[Trace]]:
    """Off, frozen, live and hindsight, over all topics."""
    interval = options.window_steps * options.ranks * load.sequences
    np.savez(folder / "whole.npz", load=load.shares_PLE.sum(axis=0))
    runs = {
        "off": run(folder, options, load, "off", interval_tokens=NEVER),
        "frozen": run(folder, options, load, "frozen", interval_tokens=interval),
        "live": run(folder, options, load, "live", interval_tokens=interval),
        "hindsight": run(
            folder, options, load, "hindsight", interval_tokens=NEVER, initial=str(folder / "whole.npz")
        ),
    }
    for name, traces in runs.items():
        say({"run": name, **summary(traces, load, top_k)})
    live, still = (summary(runs[n], load, top_k)["tokens_per_second"] for n in ("live", "hindsight"))
    say({"check": "live >= 0.95 x hindsight", "value": live / still, "met": live >= 0.95 * still})
    return runs


def one_topic(folder: Path, options: argparse.Namespace, load: Load, top_k: int) -> None:
    """A steady load: the prediction, and the gain that balancedness predicts."""
    steady = Load(**{**asdict(load), "shares_PLE": load.shares_PLE[:1], "steps": 2 * load.steps})
    interval = options.window_steps * options.ranks * load.sequences
    off = run(folder, options, steady, "off", interval_tokens=NEVER)
    live = run(folder, options, steady, "live", interval_tokens=interval)
    half = load.steps  # by then the moves are over
    measured, predicted = late(live, half), live[0].predicted or 0.0
    say({"run": "topic off", **summary(off, steady, top_k)})
    say({"run": "topic live", **summary(live, steady, top_k), "balancedness_late": measured})
    apart = abs(measured - predicted)
    say({"check": "balancedness within 0.03 of the solver's", "predicted": predicted, "measured": measured,
         "value": apart, "met": apart <= 0.03})  # fmt: skip
    promised = steps_ratio(live, half) / steps_ratio(off, half)
    gain = rate(live, half) / rate(off, half)
    say({"check": "gain >= 0.9 of what the steps' balancedness predicts", "gain": gain, "predicted": promised,
         "value": gain / promised, "met": gain >= 0.9 * promised})  # fmt: skip


def steps_ratio(traces: list[Trace], first: int) -> float:
    """Mean over peak rows, summed over layers and steps: how much of the charged time is needed."""
    received_RWL = np.array([t.received[first:] for t in traces])
    return float(received_RWL.mean(axis=0).sum() / received_RWL.max(axis=0).sum())


def pause(folder: Path, options: argparse.Namespace, load: Load) -> None:
    """Windows with and without forced moves, alternating in one run. A step counts as one with moves if
    experts were on the move in it."""
    steady = Load(**{**asdict(load), "shares_PLE": load.shares_PLE[:1], "steps": 3 * load.steps})
    # Permutations change the balance too, so rows cost alike wherever they are: the load is flat.
    flat = Load(**{**asdict(steady), "shares_PLE": np.full_like(steady.shares_PLE, 1 / options.experts)})
    traces = run(folder, options, flat, "pause", interval_tokens=NEVER)
    # The time that rows took differs by placement; what is left is what moving costs.
    peak_WL = np.array([t.received for t in traces]).max(axis=0)
    rows_seconds = peak_WL.sum(axis=1) * load.row_seconds
    seconds, moving = np.array(traces[0].seconds), np.array(traces[0].moving)
    with_moves, without = (float(np.percentile(seconds[m], 99)) for m in (moving, ~moving))
    say({"check": "p99 ITL with moves <= 1.25 x without", "with_ms": 1e3 * with_moves,
         "without_ms": 1e3 * without, "value": with_moves / without, "met": with_moves <= 1.25 * without,
         "steps": [int(moving.sum()), int((~moving).sum())], "commits": traces[0].epochs[-1],
         "over_rows_ms_p50": [1e3 * float(np.median((seconds - rows_seconds)[m])) for m in (moving, ~moving)],
         "stall_ms_per_commit": 1e3 * traces[0].stall_seconds / max(traces[0].epochs[-1], 1)})  # fmt: skip


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line, default=lambda number: number.item()), flush=True)


def plot(path: Path, runs: dict[str, list[Trace]], load: Load) -> None:
    """Three panels over steps: balancedness, time between tokens, layers committed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(10, 8), layout="constrained")
    for name, traces in runs.items():
        received_RWL = np.array([t.received for t in traces])
        axes[0].plot(np.convolve(step_balancedness(received_RWL), np.ones(8) / 8, "valid"), label=name)
        axes[1].plot(1e3 * np.array(traces[0].seconds), label=name, linewidth=0.8)
        axes[2].plot(np.array(traces[0].epochs), label=name)
    for axis, label in zip(
        axes, ("balancedness (mean of 8 steps)", "time between tokens, ms", "epoch"), strict=True
    ):
        axis.set_ylabel(label)
        for topic in range(1, len(load.shares_PLE)):
            axis.axvline(topic * load.steps, color="grey", linewidth=0.5)
    axes[0].legend()
    axes[2].set_xlabel("step")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", type=Path, required=True, help="CSV, a row of shares per layer")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=32, help="of a rank, decoding all the time")
    parser.add_argument("--topics", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of a topic")
    parser.add_argument("--window-steps", type=int, default=8, help="between decisions")
    parser.add_argument("--row-us", type=float, default=100.0)
    parser.add_argument("--only", choices=("shifting", "topic", "pause"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder / "model", family="qwen3_moe", size=options.size)
        spec = read_spec(folder / "model")
        options.experts = spec.moe.num_experts
        load = Load(
            shares_PLE=folded(options.loads, options.experts, spec.num_moe_layers, options.topics),
            steps=options.steps,
            row_seconds=options.row_us * 1e-6,
            sequences=options.sequences,
        )
        say({"commit": read_commit(), "options": {k: str(v) for k, v in vars(options).items()}})
        if options.only in (None, "pause"):
            pause(folder, options, load)
        if options.only in (None, "topic"):
            one_topic(folder, options, load, spec.moe.router.top_k)
        if options.only in (None, "shifting"):
            runs = shifting(folder, options, load, spec.moe.router.top_k)
            if options.plot is not None:
                plot(options.plot, runs, load)


if __name__ == "__main__":
    main()
