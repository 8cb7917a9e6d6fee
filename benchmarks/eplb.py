#!/usr/bin/env python3
"""The expert balancer against the published algorithm: quality, time, and bytes moved while loads change.

    python benchmarks/eplb.py --loads DIR [--out eplb.jsonl] [--plot eplb.png] [--windows 200] [--check]

quality    balancedness, gap to the proven bound and time, per load set, ranks, quality and split; compared
           with our reproduction of the published algorithm in the same run, alternating, medians
replay     balancedness in the *next* window and bytes moved, over sequences of windows (noise of 5 % and
           20 % with correlation 0, 0.5 and 0.9 from window to window; changes of topic); compared with
           re-solving every window from nothing, and with the published algorithm

DIR holds CSV or JSON files of expert loads, a row per MoE layer, as configs/loads does; without it only
synthetic loads are used. The reproduction of the published algorithm loops in Python over numpy floats, which
is faster than the published code over torch scalars, so ratios of time are on the safe side. Output: JSON
lines, one a measurement, each with what was asked of it (`asked`) and whether it was met (`met`, null where
nothing was asked).
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moe_runtime.eplb.drift import reverting, switching
from moe_runtime.eplb.load_files import read_load
from moe_runtime.eplb.policy import RebalancePolicy
from moe_runtime.eplb.published import published
from moe_runtime.eplb.replay import Planner, Replay, policy_planner, replay
from moe_runtime.eplb.solve import equal_peak, solve
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.placement.topology import Topology
from moe_runtime.report.machine import read_commit, read_machine

SIZES = ((32, 288), (72, 288), (144, 288), (320, 320))  # ranks, slots
EXPERT_BYTES = 3 * 7168 * 2048  # DeepSeek-V3, FP8
PAIRS = 1e6  # per layer and window
# Of a minute's window of a decode unit of 144 ranks; see docs/eplb.md.
SECONDS_PER_PAIR = 4e-5
LAYER_STEP = 15  # the replays take every 15th layer of a load set


def topology(ranks: int) -> Topology:
    return Topology(nodes=ranks // 8, ranks_per_node=8)


def synthetic(layers: int = 8, experts: int = 256) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    loads = {"lognormal 1.0": rng.lognormal(0, 1, (layers, experts))}
    for alpha in (1.0, 1.1, 1.2):
        row = 1 / np.arange(1, experts + 1) ** alpha
        loads[f"power law {alpha}"] = rng.permuted(np.tile(row, (layers, 1)), axis=1)
    hot = rng.lognormal(0, 0.5, (layers, experts))
    hot[:, 7] = 0
    hot[:, 7] = 4 * hot.sum(axis=1)
    loads["one expert with 80 %"] = hot
    return loads


def measured(folder: Path | None) -> dict[str, np.ndarray]:
    files = [] if folder is None else [p for p in sorted(folder.iterdir()) if p.suffix in (".csv", ".json")]
    return {path.stem: read_load(path) for path in files}


def has_twins(experts_LP: np.ndarray, ranks: int) -> int:
    """Layers in which an expert is twice on a rank."""
    ordered = np.sort(experts_LP.reshape(len(experts_LP), ranks, -1), axis=2)
    return int((ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2)).sum())


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """With the CPU time it took: nothing here runs on more than one core, and others may use the machine."""
    begin = time.process_time()
    result = call()
    return result, time.process_time() - begin


def quality_rows(name: str, load: np.ndarray, repeats: int) -> Iterator[dict[str, Any]]:
    """All variants of one load set; the variants of a size alternate, so that all meet the same machine."""
    for ranks, slots in SIZES:
        where = topology(ranks)
        calls: dict[str, Callable[[], Any]] = {
            "published": lambda r=ranks, s=slots: published(load.astype(np.float32), s, 1, 1, r)
        }
        for quality in ("default", "best"):
            for split in ("equal", "weighted"):
                calls[f"{quality} {split}"] = lambda w=where, s=slots, q=quality, p=split: solve(
                    load, w, s, quality=q, split=p
                )
        seconds: dict[str, list[float]] = {key: [] for key in calls}
        results: dict[str, Any] = {}
        for _ in range(repeats):
            for key, call in calls.items():
                results[key], took = timed(call)
                seconds[key].append(took)
        experts = results.pop("published")[0]
        theirs = equal_peak(experts.astype(np.int32), load, ranks)
        base_ms = statistics.median(seconds["published"]) * 1e3
        for key, solution in results.items():
            yield {
                "part": "quality",
                "load": name,
                "layers": len(load),
                "ranks": ranks,
                "slots": slots,
                "variant": key,
                "balancedness": float(solution.balancedness_L.mean()),
                "balancedness_equal_split": float(solution.balancedness_equal_L.mean()),
                "balancedness_published": float((solution.mean_L / theirs).mean()),
                "balancedness_bound": float((solution.mean_L / solution.bound_L).mean()),
                "layers_worse_than_published": int((solution.peak_L > theirs * (1 + 1e-9)).sum()),
                "layers_published_puts_twice": has_twins(experts, ranks),
                "gap_mean": float(solution.gap_L.mean()),
                "layers_within_1_percent": int((solution.gap_L < 0.01).sum()),
                "bound_by": dict(Counter(solution.reason_L)),
                "ms": statistics.median(seconds[key]) * 1e3,
                "ms_published": base_ms,
                **verdict_of_quality(name, ranks, key, solution, theirs, statistics.median(seconds[key])),
            }


def verdict_of_quality(
    name: str, ranks: int, key: str, solution: Any, theirs: np.ndarray, seconds: float
) -> dict[str, Any]:
    if not name.startswith("dsv3"):
        return {"asked": None, "met": None}
    asked = ["no layer worse than published"]
    met = bool((solution.peak_L <= theirs * (1 + 1e-9)).all())
    if ranks <= 72:
        asked.append("gap under 1 % in 90 % of layers")
        met &= bool((solution.gap_L < 0.01).mean() >= 0.9)
    if ranks == 144:
        limit = 0.1 if key.startswith("default") else 1.0
        asked.append(f"under {limit:g} s")
        met &= seconds < limit
    return {"asked": "; ".join(asked), "met": met}


def sequences(
    base: np.ndarray, windows: int, seed: int
) -> Iterator[tuple[str, float, Callable[[], Iterator[np.ndarray]]]]:
    """Name, noise (0 for the topic switches) and a fresh iterator of windows."""
    for noise in (0.05, 0.2):
        for memory in (0.0, 0.5, 0.9):
            yield (
                f"noise {noise:.0%} correlation {memory:g}",
                noise,
                lambda n=noise, m=memory: reverting(
                    base, noise=n, memory=m, windows=windows, seed=seed, pairs=PAIRS
                ),
            )
    every = max(windows // 5, 4)
    yield (
        f"topic every {every} windows, noise 5%",
        0.0,
        lambda: switching(base, noise=0.05, memory=0.0, windows=windows, every=every, seed=seed),
    )


def anew(where: Topology, slots: int) -> Planner:
    return lambda load, current: solve(load, where, slots).placement


def published_planner(slots: int, ranks: int) -> Planner:
    def plan(load: np.ndarray, current: Placement) -> Placement:
        table = published(load.astype(np.float32), slots, 1, 1, ranks)[0].astype(np.int32)
        # The hard rule of Placement: an expert that is twice on a rank leaves the slot empty.
        tiles = table.reshape(len(table), ranks, -1)
        for slot in range(1, tiles.shape[2]):
            again = (tiles[..., slot : slot + 1] == tiles[..., :slot]).any(axis=2)
            tiles[again, slot] = -1
        return Placement(slot_to_expert_LS=table, num_experts=load.shape[1], num_ranks=ranks)

    return plan


def replay_rows(
    name: str, load: np.ndarray, windows: int, seed: int, only: re.Pattern[str]
) -> Iterator[dict[str, Any]]:
    """Those replays of one load set whose title, as printed, matches `only`."""
    base = load[::LAYER_STEP] if len(load) > LAYER_STEP else load
    for ranks, slots in SIZES[:3]:
        where = topology(ranks)
        first = linear(
            num_layers=len(base),
            num_experts=base.shape[1],
            num_ranks=ranks,
            redundant_experts=slots - base.shape[1],
        )
        policy = RebalancePolicy(
            topology=where, slots=slots, seconds_per_pair=SECONDS_PER_PAIR, expert_bytes=EXPERT_BYTES
        )
        for sequence, noise, make in sequences(base, windows, seed):
            if not only.search(f"{name} {ranks} ranks {sequence}"):
                continue
            planners = {
                "ours": policy_planner(policy),
                "anew": anew(where, slots),
                "published": published_planner(slots, ranks),
            }
            runs = {key: replay(make(), plan, first, where, EXPERT_BYTES) for key, plan in planners.items()}
            ours, fresh = runs["ours"], runs["anew"]
            steady = noise == 0.05 and "correlation 0" in sequence and "0." not in sequence
            yield {
                "part": "replay",
                "load": name,
                "layers": len(base),
                "ranks": ranks,
                "windows": windows,
                "seed": seed,
                "sequence": sequence,
                "balancedness": {key: mean_balance(run) for key, run in runs.items()},
                "bytes": {key: float(run.bytes_W.sum()) for key, run in runs.items()},
                "bytes_ratio": float(ours.bytes_W.sum() / fresh.bytes_W.sum()),
                "moves_after_first": int(ours.moves_W[1:].sum()),
                **verdict_of_replay(ours, fresh, steady, sequence),
            }


def verdict_of_replay(ours: Replay, fresh: Replay, steady: bool, sequence: str) -> dict[str, Any]:
    asked = ["at most 10 % of the bytes of planning anew", "balancedness within 0.02 of it"]
    met = bool(ours.bytes_W.sum() <= 0.1 * fresh.bytes_W.sum())
    met &= mean_balance(ours) >= mean_balance(fresh) - 0.02
    if steady:
        asked.append("no moves after the first")
        met &= bool(ours.moves_W[1:].sum() == 0)
    if sequence.startswith("topic"):
        asked.append("every switch followed within two windows")
        met &= followed(ours, fresh)
    return {"asked": "; ".join(asked), "met": met}


def mean_balance(run: Replay) -> float:
    return float(np.nanmean(run.balancedness_W))


def followed(ours: Replay, fresh: Replay) -> bool:
    """Two windows after each jump of the load, ours is within 0.05 of planning anew in that window."""
    jumps = np.flatnonzero(fresh.balancedness_W < 0.7 * np.nanmedian(fresh.balancedness_W))
    after = [j + 2 for j in jumps if j + 2 < len(fresh.balancedness_W) - 1]
    return all(ours.balancedness_W[w] >= fresh.balancedness_W[w] - 0.05 for w in after)


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    quality = [r for r in rows if r["part"] == "quality" and r["variant"] == "default weighted"]
    replays = [r for r in rows if r["part"] == "replay"]
    drawn = [
        draw for draw, some in ((plot_quality, quality), (plot_replays, replays)) if some
    ]  # a run may have one part only
    if not drawn:
        return
    figure = Figure(figsize=(7 * len(drawn), 5.5), layout="constrained")
    for ax, draw in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        draw(ax, quality if draw is plot_quality else replays)
    figure.savefig(path, dpi=120)


def plot_quality(ax: Any, rows: list[dict[str, Any]]) -> None:
    x = np.arange(len(rows))
    bars = (("published", "_published", -0.3), ("default", "", 0.0), ("proven bound", "_bound", 0.3))
    for label, key, shift in bars:
        ax.bar(x + shift, [r["balancedness" + key] for r in rows], 0.28, label=label)
    labels = [f"{r['load'].split('_expert_')[0]}, {r['ranks']} ranks" for r in rows]
    ax.set_xticks(x, labels, rotation=90, fontsize=6)
    ax.set_ylabel("balancedness")
    ax.set_ylim(0, 1.15)  # room for the legend
    ax.legend(fontsize=7, ncols=3, loc="upper center")


def plot_replays(ax: Any, rows: list[dict[str, Any]]) -> None:
    for key, marker in (("ours", "o"), ("anew", "s"), ("published", "^")):
        ax.scatter(
            [max(r["bytes"][key], 1.0) for r in rows],
            [r["balancedness"][key] for r in rows],
            marker=marker,
            s=14,
            alpha=0.6,
            label=key,
        )
    ax.set_xscale("log")
    ax.set_xlabel("bytes moved in the replay")
    ax.set_ylabel("balancedness in the next window")
    ax.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--loads", type=Path, help="folder of CSV or JSON files")
    parser.add_argument("--out", type=Path, default=Path("eplb.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the replayed windows")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help='replays, as in "decode.* 144 ranks noise 20%%"'
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="quality,replay")
    parser.add_argument("--check", action="store_true", help="exit 1 if something asked is not met")
    arguments = parser.parse_args(argv)
    loads = {**measured(arguments.loads), **synthetic()}
    stamp = {
        "commit": read_commit(),
        "machine": msgspec.to_builtins(read_machine(hardware="", device="cpu")),
        "numpy": np.__version__,
    }
    rows: list[dict[str, Any]] = []
    with arguments.out.open("w") as out:
        for name, load in loads.items():
            parts: list[Iterator[dict[str, Any]]] = []
            if "quality" in arguments.parts:
                parts.append(quality_rows(name, load, arguments.repeats))
            if "replay" in arguments.parts:
                parts.append(
                    replay_rows(name, load, arguments.windows, arguments.seed, re.compile(arguments.only))
                )
            for part in parts:
                for row in part:
                    rows.append(row)
                    out.write(json.dumps({**row, **stamp}) + "\n")
                    out.flush()
                    print(describe(row), flush=True)
    if arguments.plot is not None:
        plot(arguments.plot, rows)
    missed = [row for row in rows if row["met"] is False]
    print(f"{len(rows)} measurements, {len(missed)} short of what was asked")
    return int(bool(missed) and arguments.check)


def describe(row: dict[str, Any]) -> str:
    met = {True: "met", False: "NOT MET", None: ""}[row["met"]]
    if row["part"] == "quality":
        return (
            f"{row['load'][:24]:24} {row['ranks']:4} ranks {row['variant']:17}"
            f" {row['balancedness']:.4f} (equal {row['balancedness_equal_split']:.4f},"
            f" published {row['balancedness_published']:.4f}, bound {row['balancedness_bound']:.4f})"
            f" within 1 %: {row['layers_within_1_percent']}/{row['layers']}"
            f" {row['ms']:.0f} ms (published {row['ms_published']:.0f}) {met}"
        )
    b = row["balancedness"]
    return (
        f"{row['load'][:24]:24} {row['ranks']:4} ranks {row['sequence']:30} ours {b['ours']:.4f}"
        f" anew {b['anew']:.4f} published {b['published']:.4f} bytes {100 * row['bytes_ratio']:.1f} %"
        f" moves after first {row['moves_after_first']} {met}"
    )


if __name__ == "__main__":
    sys.exit(main())
