#!/usr/bin/env python3
"""The experts of one rank on a CPU: the runtime's own path against torch's, in one run.

    python benchmarks/cpu_experts.py [--tokens 1 16 64 512] [--seconds 4] [--out cpu_experts.jsonl] [--check]

Rows grouped by slot, as a dispatch delivers them, through 32 gated MLPs of 512 -> 256 -> 512, float32:

    ours      kernels/experts/cpu.py with packed weights, which is what the runtime calls
    grouped   torch.nn.functional.grouped_mm on all slots at once, gate and up in one product
    loop      slot after slot with torch.nn.functional.linear, empty slots skipped
    dense     no experts: one product of as many operations that reads as many weights once, the rows of
              the mean slot times the weights of all slots in use, plain (torch.nn.functional.linear)
    packed    the same by kernels/linear/cpu.py on packed weights: what no experts can undercut by much

All take turns, call by call; a time is the median over the calls, a ratio the median of the ratios
within a turn, so that what slows the machine for a while slows both. `ours_to_better` is the larger of the
ratios to grouped and loop. Output: a JSON line per number of tokens.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels.experts import cpu, reference
from moe_runtime.kernels.linear.cpu import linear
from moe_runtime.kernels.pack.cpu import pack
from moe_runtime.kernels.permute.cpu import permute
from moe_runtime.report.machine import read_commit, read_machine

SLOTS, TOP_K, HIDDEN, INTER, THREADS, LAYERS = 32, 4, 512, 256, 2, 4
TOLERANCE = 1.05  # times the better of grouped and loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows grouped by slot."""

    x_NH: Tensor
    starts_s: Tensor
    counts_s: Tensor

    @property
    def used(self) -> int:
        """Slots with rows."""
        return int((self.counts_s > 0).sum())


Weights = tuple[Tensor, Tensor]
Way = Callable[[Rows, Weights], Tensor]


def ours(rows: Rows, weights: Weights) -> Tensor:
    return cpu.experts(rows.x_NH, rows.starts_s, rows.counts_s, *weights)


def grouped(rows: Rows, weights: Weights) -> Tensor:
    gate_up, down = (w.transpose(1, 2) for w in weights)
    ends_s = (rows.starts_s + rows.counts_s).to(torch.int32)
    gate, up = F.grouped_mm(rows.x_NH, gate_up, offs=ends_s).chunk(2, -1)
    return F.grouped_mm(F.silu(gate).mul_(up), down, offs=ends_s)


def loop(rows: Rows, weights: Weights) -> Tensor:
    gate_up, down = weights
    y_NH = torch.empty_like(rows.x_NH)
    bounds = zip(rows.starts_s.tolist(), rows.counts_s.tolist(), strict=True)
    for slot, (start, count) in enumerate(bounds):
        if count:
            part = slice(start, start + count)
            gate, up = F.linear(rows.x_NH[part], gate_up[slot]).chunk(2, -1)
            y_NH[part] = F.linear(F.silu(gate).mul_(up), down[slot])
    return y_NH


def dense(rows: Rows, weights: Weights) -> Tensor:
    return F.linear(rows.x_NH, weights[0])


def packed(rows: Rows, weights: Weights) -> Tensor:
    return linear(rows.x_NH, weights[0])


WAYS: tuple[Way, ...] = (ours, grouped, loop, dense, packed)


class Setting:
    """Rows of `tokens` tokens with random experts; for each way and each of LAYERS layers weights of its own.

    So no way finds weights in a cache that another one, or the turn before, has read.
    """

    def __init__(self, tokens: int) -> None:
        rng = torch.Generator().manual_seed(tokens)
        x_TH = torch.randn(tokens, HIDDEN, generator=rng)
        slot_ids_TK = torch.rand(tokens, SLOTS, generator=rng).argsort(1)[:, :TOP_K].contiguous()
        x_NH, _, starts_s, counts_s = permute(x_TH, slot_ids_TK, SLOTS)
        self.rows = Rows(x_NH=x_NH, starts_s=starts_s, counts_s=counts_s)
        gate_up = torch.randn(SLOTS, 2 * INTER, HIDDEN, generator=rng) / HIDDEN**0.5
        down = torch.randn(SLOTS, HIDDEN, INTER, generator=rng) / INTER**0.5
        want = reference.experts(x_NH, starts_s, counts_s, gate_up, down)
        used = self.rows.used
        mean = -(-len(x_NH) // used)
        self.dense_rows = Rows(x_NH=x_NH[:mean], starts_s=starts_s, counts_s=counts_s)
        # The dense product has whole rows per slot: what it does too much is taken off its time.
        self.dense_share = len(x_NH) / (mean * used)
        self.layers: list[tuple[Weights, ...]] = [
            (
                (pack(gate_up.clone(), parts=2), pack(down.clone())),
                (gate_up.clone(), down.clone()),
                (gate_up.clone(), down.clone()),
                (torch.randn(used * 3 * INTER, HIDDEN, generator=rng), down),
                (pack(torch.randn(used * 3 * INTER, HIDDEN, generator=rng)), down),
            )
            for _ in range(LAYERS)
        ]
        for way, weights in zip(WAYS[:3], self.layers[0], strict=False):
            if not torch.allclose(way(self.rows, weights), want, rtol=1e-4, atol=1e-4):
                raise RuntimeError(f"{way.__name__} differs from the reference")

    def turn(self, number: int) -> list[float]:
        """Seconds of each way, one after another."""
        seconds = []
        for way, weights in zip(WAYS, self.layers[number % LAYERS], strict=True):
            rows = self.dense_rows if way in (dense, packed) else self.rows
            began = time.perf_counter()
            way(rows, weights)
            seconds.append(time.perf_counter() - began)
        seconds[3:] = (self.dense_share * t for t in seconds[3:])
        return seconds


def measure(tokens: int, seconds: float) -> dict[str, Any]:
    """Medians over turns that last `seconds` together."""
    setting = Setting(tokens)
    turns: list[list[float]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(turns) < 30:
        turns.append(setting.turn(len(turns)))
    turns = turns[len(turns) // 10 :]  # the first ones warm up
    by_way = zip(WAYS, zip(*turns, strict=True), strict=True)
    times = {way.__name__: statistics.median(t) for way, t in by_way}
    ratios = {way.__name__: statistics.median(t[0] / t[i] for t in turns) for i, way in enumerate(WAYS)}
    return {
        "tokens": tokens,
        "rows": len(setting.rows.x_NH),
        "slots_used": setting.rows.used,
        "turns": len(turns),
        "microseconds": {name: round(value * 1e6, 1) for name, value in times.items()},
        "ours_to_better": round(max(ratios["grouped"], ratios["loop"]), 3),
        **{f"ours_to_{name}": round(ratio, 3) for name, ratio in ratios.items() if name != "ours"},
    }


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--seconds", type=float, default=4.0, help="per number of tokens")
    parser.add_argument("--out", type=Path, help="append the lines to a file as well")
    parser.add_argument("--check", action="store_true", help="exit 1 unless ours is as fast as the better")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    machine = read_machine(hardware="", device="cpu")
    common = {"commit": read_commit(), "machine": f"{machine.cpu_model}, {machine.cores} cores"}
    missed = False
    for tokens in options.tokens:
        row = measure(tokens, options.seconds)
        missed |= row["ours_to_better"] > TOLERANCE
        line = json.dumps({"benchmark": "cpu_experts", **row, **common, "load_average": os.getloadavg()[0]})
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
