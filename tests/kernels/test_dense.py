"""linear, gated_mlp, experts, silu_mul, rms_norm: CPU paths and references against float64.

Tolerances are those of float32 sums: a few roundings of the largest partial sum.
"""

from typing import Any

import pytest
import torch

from moe_runtime.kernels.registry import select

ROWS = [0, 1, 2, 17, 200]
F32: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-5}
DEVICES = ["cpu", "any"]  # `any` is not a device of the table: the reference


def randn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def mlp64(x, gate_up, down):
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ down.double().T


def layouts(weight, parts=1):
    """(kernel column, weight in a layout it takes): plain for both, packed for the CPU."""
    packed = select("pack", "cpu")(weight.clone(), parts=parts)
    yield "any", select("pack", "any")(weight.clone(), parts=parts)
    yield "cpu", weight
    yield "cpu", packed


@pytest.mark.parametrize("outputs", [7, 48, 832])
def test_linear(outputs):
    weight, bias = randn(outputs, 96, seed=1), randn(outputs, seed=2)
    for device, laid_out in layouts(weight):
        linear = select("linear", device)
        for rows in ROWS:
            x, residual = randn(rows, 96, seed=rows), randn(rows, outputs, seed=3)
            want = x.double() @ weight.double().T
            torch.testing.assert_close(linear(x, laid_out), want.float(), **F32)
            torch.testing.assert_close(linear(x, laid_out, bias), (want + bias).float(), **F32)
            for b in (None, bias):
                total = residual.clone()
                got = linear(x, laid_out, b, add_to=total)
                assert got is total
                torch.testing.assert_close(got, (want + residual + (0 if b is None else b)).float(), **F32)
            # Rows of a wider tensor, as the latents are.
            part = randn(rows, 200, seed=rows)[:, 50:146]
            torch.testing.assert_close(
                linear(part, laid_out), (part.double() @ weight.double().T).float(), **F32
            )


@pytest.mark.parametrize("inter", [20, 32, 64])
def test_gated_mlp(inter):
    gate_up, down = randn(2 * inter, 48, seed=1, scale=0.2), randn(48, inter, seed=2, scale=0.2)
    for (device, first), (_, second) in zip(layouts(gate_up, parts=2), layouts(down), strict=True):
        mlp = select("gated_mlp", device)
        for rows in ROWS:
            x, residual = randn(rows, 48, seed=rows), randn(rows, 48, seed=9)
            want = mlp64(x, gate_up, down)
            torch.testing.assert_close(mlp(x, first, second), want.float(), **F32)
            total = residual.clone()
            assert mlp(x, first, second, add_to=total) is total
            torch.testing.assert_close(total, (want + residual).float(), **F32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gaps", [False, True])
def test_experts(dtype, gaps):
    counts = [3, 0, 1, 200, 12, 0, 5]
    starts, first = [], 0
    for count in counts:
        starts.append(first)
        first += -(-count // 8) * 8 if gaps else count
    x = randn(first, 48, seed=1).to(dtype)
    gate_up = randn(7, 64, 48, seed=2, scale=0.2).to(dtype)
    down = randn(7, 48, 32, seed=3, scale=0.2).to(dtype)
    weights = randn(first, seed=4)
    want = torch.zeros(first, 48, dtype=torch.float64)
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        rows = slice(start, start + count)
        want[rows] = mlp64(x[rows], gate_up[slot], down[slot])
    tolerance: dict[str, Any] = F32 if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    csr = (torch.tensor(starts, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))
    nothing = torch.zeros(7, dtype=torch.int32)
    for (device, a), (_, b) in zip(layouts(gate_up, parts=2), layouts(down), strict=True):
        experts = select("experts", device)
        torch.testing.assert_close(experts(x, *csr, a, b), want.to(dtype), **tolerance)
        weighted = experts(x, *csr, a, b, weights)
        assert weighted.dtype == dtype
        torch.testing.assert_close(weighted, (want * weights[:, None]).to(dtype), **tolerance)
        assert experts(x[:0], nothing, nothing, a, b).shape == (0, 48)


def test_pack_transposes_blocks_in_place(monkeypatch):
    monkeypatch.setattr("moe_runtime.kernels.pack.cpu._CHUNK_VALUES", 3 * 32 * 5)  # several chunks
    weight = randn(3, 96, 5, seed=1)
    plain = weight.clone()
    packed = select("pack", "cpu")(weight)
    assert packed.shape == (3, 3, 5, 32)
    assert packed.data_ptr() == weight.data_ptr()
    assert torch.equal(packed.transpose(2, 3).reshape(3, 96, 5), plain)
    # Two parts of 48 rows: a block must not straddle them.
    assert select("pack", "cpu")(plain.clone(), parts=2).shape == (3, 6, 5, 16)
    for odd in (randn(40, 5), randn(64, 5).bfloat16(), randn(0, 64, 5)):
        assert select("pack", "cpu")(odd) is odd


def test_silu_mul_paths_are_equal():
    for dtype in (torch.float32, torch.bfloat16):
        gate, up = randn(9, 33, seed=1).to(dtype), randn(9, 33, seed=2).to(dtype)
        want = (gate.double() * torch.sigmoid(gate.double()) * up.double()).to(dtype)
        got = select("silu_mul", "any")(gate, up)
        assert torch.equal(select("silu_mul", "cpu")(gate, up), got)
        torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float32 else 0.02, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(device, dtype):
    norm = select("rms_norm", device)
    weight = randn(64, seed=1).to(dtype)
    for shape in ((0, 64), (1, 64), (7, 64), (5, 3, 64)):
        x = (randn(*shape, seed=2) * 3).to(dtype)
        wide = x.double()
        want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        tolerance: dict[str, Any] = (
            {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-3}
        )
        torch.testing.assert_close(norm(x, weight, 1e-6), want.to(dtype), **tolerance)
        inside = torch.cat((x, x), -1)[..., :64]
        norm(inside, weight, 1e-6, out=inside)
        torch.testing.assert_close(inside, want.to(dtype), **tolerance)
    tiny = torch.full((1, 64), 1e-4, dtype=dtype)
    assert norm(tiny, torch.ones(64, dtype=dtype), 1e-6).float().mean() == pytest.approx(0.0995, rel=0.01)
