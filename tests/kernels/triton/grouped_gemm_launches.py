"""Run as a process of its own: does grouped_gemm's launcher ask for the compilations that `aot_cases` lists?

Triton is told that it sits on a chip and is stopped before it compiles, so what a launch on that chip
would compile becomes known here: types, constants, what is known to be divisible, warps and stages.
Prints a line per difference and the number of launches; exit status 1 if there is a difference.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

os.environ.pop("TRITON_INTERPRET", None)

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from moe_runtime.kernels.aot.case import TARGETS, AotCase, Target  # noqa: E402
from moe_runtime.kernels.chip import Chip  # noqa: E402
from moe_runtime.kernels.grouped_gemm import formats  # noqa: E402
from moe_runtime.kernels.grouped_gemm import triton as kernel  # noqa: E402

SLOTS, OUTPUTS, INPUTS = 3, 256, 512
ROWS = (1, 16, 48, 90, 150, 1000)  # alone: a slot's 1 row, up to hundreds
Wanted = tuple[tuple[tuple[str, Any], ...], int, int]


class Driver:
    """As much of a device as a launch looks at before it compiles."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget(target.backend, target.arch, target.warp)
        self._device = TARGETS.index(target)  # launches remember what they found out about a device

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, _: int) -> int:
        return 0


def of_case(case: AotCase) -> Wanted:
    """Argument -> its constant, or its type and whether it is known to be divisible by 16."""
    arguments: dict[str, Any] = {name: (kind, name in case.aligned) for name, kind in case.signature.items()}
    return tuple(sorted((arguments | dict(case.constants)).items())), case.num_warps, case.num_stages


def of_launch(asked: dict[str, Any]) -> Wanted:
    names = kernel.grouped_gemm_kernel.arg_names
    constants = {names[at[0]]: value for at, value in asked["constants"].items()}
    divisible = {names[at[0]] for at, facts in asked["configs"][0].items() if facts}
    arguments = {
        name: constants[name] if name in constants else (kind.replace(" ", ""), name in divisible)
        for name, kind in asked["signature"].items()
    }
    return tuple(sorted(arguments.items())), asked["num_warps"], asked["num_stages"]


def weights(target: Target) -> Iterator[tuple[formats.Weight, torch.dtype]]:
    """One of each format, never read, and the dtype of its rows."""
    shape = (SLOTS, OUTPUTS, INPUTS)
    e4m3 = torch.float8_e4m3fn if target.fp8 == "fp8e4nv" else torch.float8_e4m3fnuz
    words = torch.empty(SLOTS, OUTPUTS, INPUTS // 8, dtype=torch.int32)
    scales = torch.empty(SLOTS, OUTPUTS, INPUTS // 32)
    yield torch.empty(shape), torch.float32
    yield torch.empty(shape, dtype=torch.bfloat16), torch.bfloat16
    yield formats.Fp8Block(torch.empty(shape, dtype=e4m3), torch.empty(SLOTS, 2, 4)), e4m3
    yield formats.Int4(words, scales.bfloat16()), torch.bfloat16
    yield formats.Mxfp4(words, scales.to(torch.uint8)), torch.bfloat16


def launch(weight: formats.Weight, dtype: torch.dtype, rows: int) -> None:
    """As gate_up, as down, and as down with weights."""
    starts = counts = torch.zeros(SLOTS, dtype=torch.int32)
    x = torch.empty(rows, INPUTS, dtype=dtype)
    scales = torch.empty(4, rows + 3)[:, :rows].t() if dtype.itemsize == 1 else None
    for gaps, row_weights in ((False, None), (True, None), (True, torch.empty(rows))):
        kernel.grouped_gemm(
            x, weight, starts, counts, x_scales_NB=scales, row_weights_N=row_weights, zero_gaps=gaps
        )


def chip(target: Target, _: torch.Tensor) -> Chip:
    return Chip(target, 100)


def main() -> int:
    asked: list[dict[str, Any]] = []

    def stop(**event: Any) -> bool:
        asked.append(event["compile"])
        return True

    triton.knobs.runtime.jit_cache_hook = stop
    run = kernel.grouped_gemm_kernel.run
    kernel.grouped_gemm_kernel.run = lambda *a, grid, warmup, **k: run(*a, grid=grid, warmup=True, **k)
    different = total = 0
    for target in TARGETS:
        driver.set_active(Driver(target))
        kernel.chip_of = partial(chip, target)  # type: ignore[attr-defined]
        listed = {of_case(case) for case in kernel.aot_cases(target)}
        asked.clear()
        for weight, dtype in weights(target):
            for rows in ROWS:
                launch(weight, dtype, rows)
        wanted = {of_launch(one) for one in asked}
        different += len(wanted ^ listed)
        for one in wanted - listed:
            print(target.name, "not listed:", one)
        for one in listed - wanted:
            print(target.name, "never launched:", one)
        total += len(wanted)
    print(f"{total} kinds of launches, {different} differences")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
