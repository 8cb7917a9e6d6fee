"""The compile-time constants of the grouped_gemm kernel, and all of its configurations.

The kernel itself is an argument here: this module imports no triton.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moe_runtime.kernels.aot.case import AotCase, Matrix, Target
from moe_runtime.kernels.grouped_gemm.formats import GROUP
from moe_runtime.kernels.grouped_gemm.tiles import Format, Tile, tiles
from moe_runtime.kernels.shapes import MODELS

BAND = 8  # row tiles that share a slot's weights while those are in the cache
SLOTS = 512  # numbers of slots up to this share compiled code
# Formats -> (rows of the tile, weighted, gaps) of the cases that stand for the others.
_REPRESENTATIVE: dict[Format, set[tuple[int, bool, bool]]] = {
    "fp32": set(),
    "16bit": {(128, False, False)},
    "fp8": {(16, False, False), (128, True, True)},
    "int4": {(16, True, True)},
    "mxfp4": set(),
}


def constants(
    form: Format, tile: Tile, inputs: int, *, descriptors: bool, gaps: bool, slots: int
) -> dict[str, Any]:
    """Constant -> value.

    WHOLE: nothing is masked along the inputs, as they fill the tiles or descriptors give zeros past
    the end. ROW_SCALES: the four scales of a row in one load, where threads would load one or two bytes.
    """
    packed = form in ("int4", "mxfp4")
    whole = inputs % tile.depth == 0 or (descriptors and not packed)
    # A tile's scales per thread, of chips with descriptors and of the others.
    scale_bytes = tile.outputs * tile.depth // GROUP * (2 if form == "int4" else 1)
    narrow = scale_bytes < 4 * tile.warps * (32 if descriptors else 64)
    return {
        "FORMAT": form,
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "DEPTH": tile.depth,
        "SWAP": tile.swap,
        "DESCRIPTORS": descriptors,
        "WHOLE": whole,
        "ROW_SCALES": packed and whole and narrow and tile.depth == 4 * GROUP,
        "GAPS": gaps,
        "SLOTS": max(SLOTS, 1 << (slots - 1).bit_length()),
        "BAND": BAND,
    }


def cases(kernel: Any, target: Target) -> Iterator[AotCase]:
    """Every tile of every format, as gate_up and as down use it.

    The numbers of inputs and outputs are arguments: all models' are multiples of 128, so they share
    the compiled code.
    """
    assert all(not (m.hidden % 128 or m.expert_intermediate % 128) for m in MODELS)
    assert all(m.experts <= SLOTS for m in MODELS)
    for form, chosen in _REPRESENTATIVE.items():
        for tile in tiles(form, target):
            for gaps, weighted in ((False, False), (True, False), (True, True)):
                case = _case(form, tile, target, gaps=gaps, weighted=weighted)
                yield replace(case, kernel=kernel, representative=(tile.rows, weighted, gaps) in chosen)


def _case(form: Format, tile: Tile, target: Target, *, gaps: bool, weighted: bool) -> AotCase:
    rows = {"fp32": "fp32", "16bit": "bf16", "fp8": target.fp8}.get(form, "bf16")
    cells, width = ("i32", tile.depth // 8) if form in ("int4", "mxfp4") else (rows, tile.depth)
    described = target.tensor_descriptors
    signature = {
        "x": f"tensordesc<{rows}[{tile.rows},{tile.depth}]>" if described else f"*{rows}",
        "w": f"tensordesc<{cells}[{tile.outputs},{width}]>" if described else f"*{cells}",
        "y": "*fp32" if form == "fp32" else "*bf16",
        "starts": "*i32",
        "counts": "*i32",
        **dict.fromkeys(
            ("num_rows", "num_slots", "num_outputs", "num_inputs", "groups", "x_row", "x_block"), "i32"
        ),
    }
    optional = {
        "x_scales": "*fp32" if form == "fp8" else None,
        "w_scales": {"fp8": "*fp32", "int4": "*bf16", "mxfp4": "*u8"}.get(form),
        "row_weights": "*fp32" if weighted else None,
    }
    signature |= {name: kind for name, kind in optional.items() if kind}
    fixed = constants(form, tile, tile.depth, descriptors=described, gaps=gaps, slots=1)
    pointers = {name for name, kind in signature.items() if kind.startswith("*")}
    use = "down, weighted" if weighted else "down" if gaps else "gate_up"
    matrix: Matrix = "fp8" if form == "fp8" else "bf16"
    if form == "fp32":
        matrix = "none" if target.backend == "cuda" else "small"
    return AotCase(
        operation="grouped_gemm",
        label=f"{form} {use} {tile.rows}x{tile.outputs}x{tile.depth}",
        kernel=None,
        signature=signature,
        constants=fixed | {name: None for name, kind in optional.items() if not kind},
        aligned=frozenset({*pointers, "num_outputs", "num_inputs", "groups"}),
        num_warps=tile.warps,
        num_stages=tile.stages,
        matrix=matrix,
        streams=True,
    )
