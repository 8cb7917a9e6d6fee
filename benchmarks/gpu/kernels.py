#!/usr/bin/env python3
"""The Triton kernels on a GPU: right against double precision, then timed, in one run of under 5 minutes.

    python -m benchmarks.gpu.kernels [--out kernels.jsonl] [--skip-checks]

First every operation with poisoned outputs (`checks.py`), then medians by CUDA events with a cold L2
(`timings.py`), set against the least time at this chip's measured rates: the bandwidth of a copy, dense
products in bf16 and fp8. Output: JSON lines, `of_floor` being floor / time; exit 1 for a wrong result, 2
for a target that is missed. Targets on an H200: grouped products at prefill shapes 0.80 of the dense
rate in bf16 and no slower than torch's, fp8 1.5 times bf16; at decode shapes 0.80 of the bandwidth;
latent decode 0.75 of it. `--tiny` runs all of it at small sizes on a CPU, to try the script: no target
means anything there.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import all_checks
from benchmarks.gpu.measure import Clock, measured_chip
from benchmarks.gpu.timings import Timing, all_timings
from moe_runtime.kernels.registry import Forced
from moe_runtime.kernels.roofline import Chip
from moe_runtime.report.machine import read_commit

FP8_SPEEDUP = 1.5  # over bf16, at prefill shapes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="append the lines to this file as well")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no GPU here; --tiny tries the script without one")
    device = torch.device("cpu" if options.tiny else "cuda")
    wrong = missed = 0
    clock = Clock(device)
    chip = measured_chip(clock, device, tiny=options.tiny)
    common = {"benchmark": "gpu_kernels", "commit": read_commit(), "machine": chip.name}

    def write(row: dict[str, Any]) -> None:
        line = json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()})
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")

    rates = {"bandwidth": chip.bandwidth, "bf16": chip.bf16, "fp8": chip.fp8}
    write({**common, **rates, "modules": dict(Forced({}).modules(device.type))})
    if not options.skip_checks:
        for check in all_checks(device, tiny=options.tiny):
            ok = check.error <= check.tolerance
            wrong += not ok
            write({**common, "check": check.operation, **check._asdict(), "ok": ok})
    bf16_seconds: dict[str, float] = {}
    for timing in all_timings(device, tiny=options.tiny):
        row = measure(clock, chip, timing)
        if timing.group and timing.work.rate == "bf16":
            bf16_seconds[timing.group] = row["seconds"]
        elif timing.group in bf16_seconds:
            row["bf16_to_fp8"] = bf16_seconds[timing.group] / row["seconds"]
            if timing.target is None:
                row["met"] = row["bf16_to_fp8"] >= FP8_SPEEDUP
        missed += row.get("met") is False
        write({**common, **row})
    if wrong:
        return 1
    return 2 if missed and not options.tiny else 0


def measure(clock: Clock, chip: Chip, timing: Timing) -> dict[str, Any]:
    """One line: the time, the floor, the baselines (or why there is none), and whether targets are met."""
    seconds, floor = clock.seconds(timing.call), timing.work.floor(chip)
    row: dict[str, Any] = {
        "operation": timing.work.operation,
        "shape": timing.work.shape,
        "seconds": seconds,
        "floor_seconds": floor,
        "of_floor": floor / seconds,
        "of_bandwidth": timing.work.bytes / chip.bandwidth / seconds,
        "of_dense_bf16": timing.work.operations / chip.bf16 / seconds,
        "bound": timing.work.bound(chip),
        "baselines": {},
    }
    for name, call in timing.baselines.items():
        try:
            row["baselines"][name] = float(f"{clock.seconds(call):.4g}")
        except (RuntimeError, ValueError, NotImplementedError) as error:  # not on this chip or torch
            row["baselines"][name] = str(error).splitlines()[0]
    if timing.target is not None:
        column = "of_bandwidth" if timing.against == "bandwidth" else "of_dense_bf16"
        row |= {"target": timing.target, "target_column": column, "met": row[column] >= timing.target}
        torch_seconds = row["baselines"].get("torch._grouped_mm")
        if timing.against == "dense" and isinstance(torch_seconds, float):
            row["met"] = row["met"] and seconds <= torch_seconds
    return row


if __name__ == "__main__":
    sys.exit(main())
