"""Live rebalancing under a shifting, skewed load: throughput, inter-token latency, and what moving costs.

Ranks are processes with the real engine, transport, mover and solver; every rank decodes the same number of
sequences all the time. Topics follow each other and heat different experts (topics.py): by their words,
through the checkpoint's routers, or with `--loads` by a double of the router. So that balance matters on a
small machine, a rank's experts take `--row-us` for each row they receive: a step takes about the sum over the
layers of the busiest rank's rows.

Runs, all with the same work:
  off        linear placement, never changed
  frozen     as live until the first topic is over, then never changed
  live       rebalances by its own decisions
  hindsight  the placement solved for the whole run's load, never changed
  gain       one topic, balanced live; then windows with that placement and with the linear one in turn
  pause      a flat load, windows with forced moves and without in turn: p99 of the time between tokens

Prints JSON lines; `--plot F.png` draws balancedness, time between tokens and moves over time.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.topics import Load, Play, folded, vocabularies  # noqa: E402
from moe_runtime.checkpoint.make import make_checkpoint  # noqa: E402
from moe_runtime.engine.agree import StepKind  # noqa: E402
from moe_runtime.engine.balancing.merge import step_balancedness  # noqa: E402
from moe_runtime.models.families.registry import read_spec  # noqa: E402
from moe_runtime.placement.placement import Placement  # noqa: E402
from moe_runtime.report.machine import read_commit  # noqa: E402
from moe_runtime.spec.model import ModelSpec  # noqa: E402
from tests.end_to_end.commands import write_plan  # noqa: E402
from tests.engine.balancing.live import Forced, balancing_of, moves  # noqa: E402
from tests.engine.instance import Driven, start  # noqa: E402
from tests.expert_parallel.world import Rank, run_world  # noqa: E402

NEVER = 1 << 40
WARM_STEPS = 4
TURN_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Of one rank, per step: wall seconds, rows its slots received [L], epoch, whether moves went on, and
    which of two placements that take turns was in use. `pairs_LE`: what its tokens chose in the whole run.
    """

    seconds: list[float]
    received: list[list[int]]
    epochs: list[int]
    moving: list[bool]
    turns: list[str]
    moves: int
    stall_seconds: float
    aborted: int
    predicted: float | None
    pairs_LE: NDArray[np.int64]


@torch.inference_mode()
def work(rank: Rank, plan: Path, load: Load, mode: str) -> Trace:
    """One rank of a run."""
    driven = start(rank, plan)
    engine = driven.engine
    engine.warm_up()
    balancing, play = balancing_of(driven), Play(driven, load)
    forced, turns = Forced(driven, []), Turns(driven)
    steps: list[tuple[float, list[int], int, bool, str]] = []
    before = time.monotonic()
    for place in play.topics():
        if mode in ("frozen", "gain") and place >= 1:
            balancing.meter.interval_tokens = NEVER
        while engine.scheduler.num_requests:
            if mode == "pause":
                forced.on = len(steps) // TURN_STEPS % 2 == 1
                forced.next_target()
            if mode == "gain" and place >= 1 and len(steps) % TURN_STEPS == 0:
                turns.change()
            was_busy = balancing.busy
            kind = engine.step()
            driven.collect()
            now = time.monotonic()
            if kind is StepKind.FORWARD:
                received = list(engine.desk.log.take().received_rows[-1])
                moving = was_busy or balancing.busy
                steps.append((now - before, received, balancing.epoch, moving, turns.now))
            before = now
    seconds, rows, epochs, moving_steps, used = zip(*steps[WARM_STEPS:], strict=True)
    status = balancing.status(time.monotonic())
    result = Trace(
        seconds=list(seconds),
        received=list(rows),
        epochs=list(epochs),
        moving=list(moving_steps),
        turns=list(used),
        moves=status.moves,
        stall_seconds=status.stall_seconds,
        aborted=status.aborted,
        predicted=balancing.controller.newest.balancedness if balancing.controller else None,
        pairs_LE=engine.desk.experts.load.recorded_LE,
    )
    driven.close()
    return result


class Turns:
    """Rank 0 has all ranks change between the placement they came from and the one that balancing made."""

    def __init__(self, driven: Driven) -> None:
        self._balancing = balancing_of(driven)
        self._off = self._live = self._balancing.placement

    def change(self) -> None:
        """Begin to go to the other one, if nothing is on the move."""
        balancing = self._balancing
        if balancing.busy:
            return
        if self._live is self._off:
            self._live = balancing.placement
        if balancing.controller is not None:
            target = self._off if self.now == "live" else self._live
            balancing.controller.move_to(target, moves(balancing.placement, target), time.monotonic())

    @property
    def now(self) -> str:
        """Which of the two is in use; empty: another."""
        if self._live is self._off:
            return ""
        return "live" if self._in_use(self._live) else "off" if self._in_use(self._off) else ""

    def _in_use(self, other: Placement) -> bool:
        mine = self._balancing.placement
        same = (mine.slot_to_expert_LS == other.slot_to_expert_LS).all()
        return bool(same and (mine.cumulative_csr == other.cumulative_csr).all())


def run(folder: Path, options: argparse.Namespace, load: Load, mode: str, **balancing: Any) -> list[Trace]:
    """All ranks of a run."""
    unified = {
        "expert_parallel": options.ranks,
        "redundant_experts": options.redundant,
        "scheduler": {"max_sequences": load.sequences},
        "kv_cache": {"blocks": load.sequences * (load.steps // 16 + 4), "prefix_cache": False},
        "overlap": {"micro_batches": 1},
        "balancing": {"enabled": True, **balancing},
    }
    path = folder / f"{mode}.{len(list(folder.glob('*.yaml')))}.yaml"
    plan = write_plan(path, folder / "model", {"unified": unified})
    return run_world(path.with_suffix(""), options.ranks, work, plan, load, mode, deadline=3600)


def summary(traces: list[Trace], load: Load) -> dict[str, Any]:
    """Throughput in decoded tokens of all ranks a second; balancedness of the whole run and of steps.

    `charged` is what the rows of the busiest ranks take of a step, `rest` what is left of the median step.
    """
    seconds = np.array(traces[0].seconds)
    received_RWL = np.array([t.received for t in traces])
    rows = received_RWL.max(axis=0).sum(axis=1) * load.row_seconds
    return {
        "tokens_per_second": len(traces) * load.sequences * len(seconds) / seconds.sum(),
        "charged_ms": 1e3 * float(rows.mean()),
        "rest_ms_p50": 1e3 * float(np.median(seconds - rows)),
        "itl_ms_p50": 1e3 * float(np.percentile(seconds, 50)),
        "itl_ms_p99": 1e3 * float(np.percentile(seconds, 99)),
        "balancedness_steps": float(step_balancedness(received_RWL).mean()),
        "balancedness_p5": float(np.percentile(step_balancedness(received_RWL), 5)),
        "balancedness_whole": balancedness(received_RWL),
        "moves": sum(t.moves for t in traces),
        "epoch": traces[0].epochs[-1],
        "aborted": max(t.aborted for t in traces),
        "stall_ms_per_step": 1e3 * max(t.stall_seconds for t in traces) / len(seconds),
    }


def balancedness(received_RWL: NDArray[np.int64]) -> float:
    """Of all steps as one window, mean over the layers."""
    total_RL = received_RWL.sum(axis=1)
    return float((total_RL.mean(axis=0) / total_RL.max(axis=0)).mean())


def window(options: argparse.Namespace) -> int:
    """Rows between decisions."""
    return int(options.window_steps * options.ranks * options.sequences)


def shifting(folder: Path, options: argparse.Namespace, load: Load) -> dict[str, list[Trace]]:
    """Off, frozen, live and hindsight, over all topics."""
    runs = {"off": run(folder, options, load, "off", interval_tokens=NEVER)}
    np.savez(folder / "whole.npz", load=sum(t.pairs_LE for t in runs["off"]))
    for name in ("frozen", "live"):
        runs[name] = run(folder, options, load, name, interval_tokens=window(options))
    known = {"interval_tokens": NEVER, "initial": str(folder / "whole.npz")}
    runs["hindsight"] = run(folder, options, load, "hindsight", **known)
    for name, traces in runs.items():
        say({"run": name, **summary(traces, load)})
    live, still = (summary(runs[n], load) for n in ("live", "hindsight"))
    value = live["tokens_per_second"] / still["tokens_per_second"]
    say({"check": "live >= 0.95 x hindsight", "value": value, "met": value >= 0.95,
         "in_charged_time": still["charged_ms"] / live["charged_ms"]})  # fmt: skip
    return runs


def gain(folder: Path, options: argparse.Namespace, load: Load) -> None:
    """A steady load, balanced live, then frozen and linear in turn: medians of steps in which nothing moves.

    `rest` is what a step takes beside the rows of the busiest rank.
    """
    steady = replace(load, order=(0, 0, 0))
    traces = run(folder, options, steady, "gain", interval_tokens=window(options))
    received_RWL = np.array([t.received for t in traces])
    seconds, still = np.array(traces[0].seconds), ~np.array(traces[0].moving)
    rows = received_RWL.max(axis=0).sum(axis=1) * load.row_seconds
    of = {name: still & np.array([turn == name for turn in traces[0].turns]) for name in ("off", "live")}
    step, charged, rest = (
        {name: 1e3 * float(np.median(values[mask])) for name, mask in of.items()}
        for values in (seconds, rows, seconds - rows)
    )
    say({"run": "gain", "steps": {n: int(m.sum()) for n, m in of.items()}, "step_ms": step,
         "charged_ms": charged, "rest_ms": rest})  # fmt: skip
    predicted, measured = traces[0].predicted or 0.0, balancedness(received_RWL[:, of["live"]])
    apart = abs(measured - predicted)
    say({"check": "balancedness within 0.03 of the solver's", "predicted": predicted, "measured": measured,
         "value": apart, "met": apart <= 0.03})  # fmt: skip
    gained, promised = step["off"] / step["live"], charged["off"] / charged["live"]
    possible = (charged["off"] + rest["off"]) / (charged["live"] + rest["off"])
    say({"check": "gain >= 0.9 of what balancedness predicts", "gain": gained, "predicted": promised,
         "if_the_rest_stays": possible, "value": gained / promised,
         "met": gained >= 0.9 * promised})  # fmt: skip


def pause(folder: Path, options: argparse.Namespace, load: Load, spec: ModelSpec) -> None:
    """Forced moves in every other window of one run. A step counts as one with moves if experts were on the
    move in it. Permutations change the balance too, so the load is flat: rows cost alike wherever they are.
    """
    shares_PLE = np.full((1, spec.num_moe_layers, spec.moe.num_experts), 1 / spec.moe.num_experts)
    flat = replace(load, order=(0, 0, 0), words_PV=None, shares_PLE=shares_PLE)
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
        for topic in range(1, len(load.order)):
            axis.axvline(topic * load.steps - WARM_STEPS, color="grey", linewidth=0.5)
    axes[0].legend()
    axes[2].set_xlabel("step")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", type=Path, help="a double of the router; CSV, a row of shares per layer")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=32, help="of a rank, decoding all the time")
    parser.add_argument("--topics", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of a topic")
    parser.add_argument("--window-steps", type=int, default=8, help="between decisions")
    parser.add_argument("--row-us", type=float, default=100.0)
    parser.add_argument("--only", choices=("shifting", "gain", "pause"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder / "model", family="qwen3_moe", size=options.size)
        spec = read_spec(folder / "model")
        load = Load(
            order=tuple(range(options.topics)),
            steps=options.steps,
            row_seconds=options.row_us * 1e-6,
            sequences=options.sequences,
            words_PV=None if options.loads else vocabularies(folder / "model", spec, options.topics),
            shares_PLE=folded(options.loads, spec, options.topics) if options.loads else None,
        )
        say({"commit": read_commit(), "options": {k: str(v) for k, v in vars(options).items()}})
        if options.only in (None, "pause"):
            pause(folder, options, load, spec)
        if options.only in (None, "gain"):
            gain(folder, options, load)
        if options.only in (None, "shifting"):
            runs = shifting(folder, options, load)
            if options.plot is not None:
                plot(options.plot, runs, load)


if __name__ == "__main__":
    main()
