"""grouped_gemm's kernel, interpreted, against the reference; outputs are poisoned before."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.grouped_gemm import formats, reference
from moe_runtime.kernels.grouped_gemm.tiles import Tile
from moe_runtime.kernels.quantize_fp8_block.reference import quantize_fp8_block
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import MATRICES, group_counts, normal, poisoned, relative_error

kernel = interpreted("grouped_gemm")

FP32_SUM, BF16_OUT, FP8 = 1e-6, 4e-3, 1e-3
ROWS_FIRST = Tile(rows=64, outputs=128, depth=128)
WEIGHTS_FIRST = Tile(rows=16, outputs=128, depth=128, swap=True)
SMALL = Tile(rows=16, outputs=64, depth=32)
TILES = pytest.mark.parametrize(
    ("tile", "descriptors"),
    [(ROWS_FIRST, True), (ROWS_FIRST, False), (WEIGHTS_FIRST, True)],
    ids=["rows first", "pointers", "weights first"],
)


def layout(counts, aligned=1):
    """(starts, counts, number of rows) of groups that start at multiples of `aligned`."""
    starts, first = [], 0
    for count in counts:
        starts.append(first)
        first += -(-count // aligned) * aligned
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), first


def compare(x, weight, starts, counts, tolerance, *, tile, descriptors=True, **how: Any):
    want = reference.grouped_gemm(x, weight, starts, counts, **how)
    with poisoned():
        got = kernel.grouped_gemm_tiled(
            x, weight, starts, counts, tile=tile, descriptors=descriptors, multiprocessors=3, **how
        )
    assert got.dtype == want.dtype
    error = relative_error(got.float(), want.float())
    assert error <= tolerance, error
    return got


@pytest.mark.parametrize("name", group_counts())
def test_rows_of_every_grouping(name):
    counts = group_counts()[name]
    weight = normal(4, 80, 48, seed=1)
    for aligned, tile in ((1, ROWS_FIRST), (8, SMALL)):
        starts, on_device, rows = layout(counts, aligned)
        x, weights = normal(rows, 48, seed=2), normal(rows, seed=4)
        got = compare(x, weight, starts, on_device, FP32_SUM, tile=tile, row_weights_N=weights)
        owned = torch.zeros(rows, dtype=torch.bool)
        for start, count in zip(starts.tolist(), counts, strict=True):
            owned[start : start + count] = True
        assert not got[~owned].any()
        assert got[owned].any(-1).all()


@TILES
@pytest.mark.parametrize(("outputs", "inputs"), MATRICES)
def test_sizes_that_fit_no_tile(outputs, inputs, tile, descriptors):
    starts, counts, rows = layout((7, 0, 20))
    x, weight = normal(rows, inputs, seed=1), normal(3, outputs, inputs, seed=2)
    how: dict[str, Any] = {"tile": tile, "descriptors": descriptors}
    compare(x.bfloat16(), weight.bfloat16(), starts, counts, FP32_SUM, out_dtype=torch.float32, **how)
    if (outputs, inputs) == MATRICES[0]:
        compare(x.bfloat16(), weight.bfloat16(), starts, counts, BF16_OUT, **how)
    if not tile.swap:
        compare(x, weight, starts, counts, FP32_SUM, **how)


def test_masked_rows_are_left_alone_past_their_count():
    counts = torch.tensor([0, 7, 40, 1], dtype=torch.int32)
    starts = torch.arange(0, 160, 40, dtype=torch.int32)
    x, weight = normal(160, 80, seed=1).bfloat16(), normal(4, 96, 80, seed=2).bfloat16()
    valid = torch.arange(40) < counts[:, None]
    x.view(4, 40, 80)[~valid] = torch.nan  # they hold anything
    want = reference.grouped_gemm(x, weight, starts, counts, out_dtype=torch.float32).view(4, 40, 96)
    for tile in (SMALL, WEIGHTS_FIRST):
        with poisoned():
            got = kernel.grouped_gemm_tiled(
                x,
                weight,
                starts,
                counts,
                tile=tile,
                descriptors=True,
                multiprocessors=3,
                zero_gaps=False,
                out_dtype=torch.float32,
            ).view(4, 40, 96)
        assert relative_error(got[valid], want[valid]) <= FP32_SUM
        assert torch.equal(~got.isnan().all(-1), valid)


@TILES
@pytest.mark.parametrize(("outputs", "inputs"), MATRICES)
def test_fp8_blocks(outputs, inputs, tile, descriptors):
    starts, counts, rows = layout((9, 0, 18), 4)
    weight = formats.encode_fp8(normal(3, outputs, inputs, seed=2) * normal(3, outputs, 1, seed=6).exp())
    x, scales = quantize_fp8_block(normal(rows, inputs, seed=3))
    if tile.swap:
        scales = scales.contiguous()  # row by row, as some dispatch backends deliver them
    how: dict[str, Any] = {"tile": tile, "descriptors": descriptors, "x_scales_NB": scales}
    compare(x, weight, starts, counts, FP8, out_dtype=torch.float32, **how)
    if (outputs, inputs) == MATRICES[0]:
        compare(x, weight, starts, counts, BF16_OUT, row_weights_N=normal(rows, seed=5), **how)


def test_fp8_as_gfx942_has_it():
    starts, counts, rows = layout((9, 0, 18), 4)
    weight = formats.encode_fp8(normal(3, 144, 256, seed=2), torch.float8_e4m3fnuz)
    x, scales = quantize_fp8_block(normal(rows, 256, seed=3), dtype=torch.float8_e4m3fnuz)
    how: dict[str, Any] = {"tile": ROWS_FIRST, "descriptors": False, "x_scales_NB": scales}
    compare(x, weight, starts, counts, FP8, out_dtype=torch.float32, **how)


def test_fp8_scale_of_each_row_of_the_weight():
    """1000 x 320: the scale grid is 8 x 3, row 127 uses scale 0 and row 128 scale 1."""
    scales = 2.0 ** torch.arange(24).view(1, 8, 3) / 2**12
    weight = formats.Fp8Block(torch.ones(1, 1000, 320).to(torch.float8_e4m3fn), scales)
    x = torch.ones(1, 320).to(torch.float8_e4m3fn)
    per_block = torch.tensor([128.0, 128.0, 64.0])
    one_group = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for tile in (ROWS_FIRST, WEIGHTS_FIRST):
        got = compare(
            x,
            weight,
            *one_group,
            FP32_SUM,
            tile=tile,
            x_scales_NB=torch.ones(1, 3),
            out_dtype=torch.float32,
        )
        assert got[0, 127] == (scales[0, 0] * per_block).sum()
        assert got[0, 128] == (scales[0, 1] * per_block).sum()
        assert got[0, 999] == (scales[0, 7] * per_block).sum()


@TILES
@pytest.mark.parametrize("encode", [formats.encode_mxfp4, formats.encode_int4])
def test_four_bit_weights(encode, tile, descriptors):
    starts, counts, rows = layout((9, 0, 18))
    how: dict[str, Any] = {"tile": tile, "descriptors": descriptors}
    for outputs, inputs in ((144, 256), (96, 320)):
        weight = encode(normal(3, outputs, inputs, seed=2))
        x = normal(rows, inputs, seed=1, dtype=torch.bfloat16)
        compare(x, weight, starts, counts, FP32_SUM, out_dtype=torch.float32, **how)
    compare(x, weight, starts, counts, BF16_OUT, **how)


def test_a_row_does_not_depend_on_its_neighbours():
    """With a constant hint the bits of a row are the same whatever else is in the batch."""
    weight, x = normal(2, 96, 80, seed=1).bfloat16(), normal(40, 80, seed=2).bfloat16()
    counts = torch.tensor([40, 0], dtype=torch.int32)
    starts = torch.tensor([0, 40], dtype=torch.int32)
    together = kernel.grouped_gemm(x, weight, starts, counts, rows_per_slot=16)
    for row in (0, 17, 39):
        alone = kernel.grouped_gemm(x[row : row + 1], weight, starts // 40, counts // 40, rows_per_slot=16)
        assert torch.equal(alone[0], together[row])


def test_what_the_kernel_cannot_read_is_refused():
    starts, counts, rows = layout((2, 2))
    x, weight = normal(rows, 80), normal(2, 96, 80)
    for wrong, match in (
        ((x[:, :64], weight), "takes 80 inputs"),
        ((x.bfloat16(), weight), "float32"),
        ((x.double(), weight.double()), "plain weight"),
        ((normal(80, rows).t(), weight), "contiguous"),
        ((normal(rows, 81), normal(2, 96, 81)), "multiple of 16"),
        ((x.to(torch.float8_e4m3fn), formats.encode_fp8(weight)), "scales"),
    ):
        with pytest.raises(KernelError, match=match):
            kernel.grouped_gemm(*wrong, starts, counts)


def test_launches_compile_what_is_listed():
    """Every chip, format, tile and use: what is compiled ahead of time is what a launch would compile."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.grouped_gemm_launches"],
        cwd=root,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "153 kinds of launches, 0 differences" in done.stdout
