"""Which tile of a grouped product one program computes at a time, from sizes alone.

Pure functions of the weights' format, the rows expected per slot and the chip, so that what can be
chosen can be listed and compiled ahead of time. Decode has few rows per slot and reads weights as
fast as memory gives them: narrow tiles, several programs per multiprocessor. Prefill has hundreds
and multiplies as fast as the matrix units go: the largest accumulator that registers hold.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from moe_runtime.kernels.aot.case import GFX_942, SM_90, SM_100, Target
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.grouped_gemm.formats import Fp8Block, Int4, Weight

Format = Literal["fp32", "16bit", "fp8", "int4", "mxfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """rows x outputs of the result, `depth` inputs at a time.

    swap      the weights are the left operand: matrix units of NVIDIA chips need 64 rows or more there,
              but take 8 or 16 columns
    programs  per multiprocessor that have room together
    """

    rows: int
    outputs: int
    depth: int
    swap: bool = False
    warps: int = 4
    stages: int = 2
    programs: int = 1


# Rows of the tile -> tile; the last is for any number of rows beyond.
_NVIDIA: dict[Format, tuple[Tile, ...]] = {
    "fp32": (Tile(rows=32, outputs=64, depth=32, stages=3, programs=2),),
    "16bit": (
        Tile(rows=16, outputs=128, depth=64, swap=True, stages=4, programs=3),
        Tile(rows=32, outputs=128, depth=64, swap=True, stages=4, programs=2),
        Tile(rows=64, outputs=128, depth=64, stages=4, programs=2),
        Tile(rows=128, outputs=256, depth=64, warps=8, stages=4),
    ),
    "fp8": (
        Tile(rows=16, outputs=128, depth=128, swap=True, stages=4, programs=3),
        Tile(rows=32, outputs=128, depth=128, swap=True, stages=4, programs=2),
        Tile(rows=64, outputs=128, depth=128, stages=4, programs=2),
        Tile(rows=128, outputs=128, depth=128, warps=8, stages=5),
    ),
    "int4": (
        Tile(rows=16, outputs=128, depth=128, swap=True, stages=4, programs=3),
        Tile(rows=32, outputs=128, depth=128, swap=True, stages=4, programs=2),
        Tile(rows=64, outputs=128, depth=128, swap=True, warps=8, stages=3),
        Tile(rows=128, outputs=128, depth=128, warps=8, stages=3),
    ),
}
_AMD: dict[Format, tuple[Tile, ...]] = {
    "fp32": (Tile(rows=32, outputs=64, depth=32, programs=2),),
    "16bit": (
        Tile(rows=16, outputs=128, depth=128, programs=1),
        Tile(rows=32, outputs=128, depth=64, programs=2),
        Tile(rows=64, outputs=128, depth=64, programs=2),
        Tile(rows=128, outputs=128, depth=64, warps=8),
    ),
    "fp8": (
        Tile(rows=16, outputs=128, depth=128, programs=2),
        Tile(rows=32, outputs=128, depth=128, programs=2),
        Tile(rows=64, outputs=128, depth=128, programs=2),
        Tile(rows=128, outputs=128, depth=128, warps=8),
    ),
    "int4": (
        Tile(rows=16, outputs=128, depth=128, programs=1),
        Tile(rows=32, outputs=128, depth=128, programs=1),
        Tile(rows=64, outputs=128, depth=128, programs=1),
        Tile(rows=128, outputs=128, depth=128, warps=8),
    ),
}
# A fourth stage of 64 rows in fp8 spills there.
_BLACKWELL: dict[Format, tuple[Tile, ...]] = {
    **_NVIDIA,
    "fp8": (
        *_NVIDIA["fp8"][:2],
        Tile(rows=64, outputs=128, depth=128, stages=3, programs=3),
        _NVIDIA["fp8"][3],
    ),
}
_TABLES = {SM_90: _NVIDIA, SM_100: _BLACKWELL, GFX_942: _AMD}


def tiles(form: Format, target: Target) -> tuple[Tile, ...]:
    """All tiles that may be chosen for a format on a chip, fewest rows first."""
    return _TABLES[target]["int4" if form == "mxfp4" else form]


def tile_shape(form: Format, rows_per_slot: int, target: Target) -> Tile:
    """The smallest tile that holds the rows expected of a slot, else the largest."""
    choice = tiles(form, target)
    return next((tile for tile in choice if rows_per_slot <= tile.rows), choice[-1])


def format_of(weight: Weight) -> Format:
    """The format's name; KernelError for a plain weight of a dtype that no kernel multiplies."""
    if isinstance(weight, torch.Tensor):
        if weight.dtype is torch.float32:
            return "fp32"
        if weight.dtype in (torch.bfloat16, torch.float16):
            return "16bit"
        raise KernelError(f"grouped_gemm: a plain weight of {weight.dtype}; give fp32, bf16 or fp16")
    if isinstance(weight, Fp8Block):
        return "fp8"
    return "int4" if isinstance(weight, Int4) else "mxfp4"
