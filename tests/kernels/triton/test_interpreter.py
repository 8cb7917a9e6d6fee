"""The repaired interpreter against torch: conversions, arithmetic and dots of bf16 and fp8."""

import torch

from tests.kernels import interpreter
from tests.kernels.triton.cases import normal, poisoned

import triton  # isort: skip  (after the interpreter has imported it)
import triton.language as tl  # isort: skip

assert interpreter


@triton.jit
def _convert(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def _arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.where(x < y, x * y + 0.5, -x))


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def test_conversions_round_as_torch_does():
    values = torch.cat(
        (
            normal(1020) * torch.tensor(2.0) ** (torch.arange(1020) % 17 - 8),
            torch.tensor([0.0, 31.1, -448.0, 1e-9]),
        )
    )
    for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        out, back = torch.empty(1024, dtype=kind), torch.empty(1024)
        _convert[(1,)](values, out, N=1024)
        limit = torch.finfo(kind).max
        assert torch.equal(out.float(), values.clamp(-limit, limit).to(kind).float())
        _convert[(1,)](out, back, N=1024)
        assert torch.equal(back, out.float())
    saturated = torch.empty(2, dtype=torch.float8_e4m3fn)
    _convert[(1,)](torch.tensor([1000.0, -torch.inf]), saturated, N=2)
    assert saturated.float().tolist() == [448.0, -448.0]


def test_bf16_arithmetic_rounds_after_each_operation():
    x, y = normal(256, seed=1, dtype=torch.bfloat16), normal(256, seed=2, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    _arithmetic[(1,)](x, y, out, N=256)
    assert torch.equal(out, torch.where(x < y, x * y + 0.5, -x))


def test_dots_multiply_numbers_not_bit_patterns():
    for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32):
        a, b = normal(32, 32, seed=3).to(kind), normal(32, 32, seed=4).to(kind)
        with poisoned():
            out = torch.empty(32, 32)
        assert out.isnan().all()
        _dot[(1,)](a, b, out, N=32)
        torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_poison_reaches_every_type():
    with poisoned():
        for kind in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            assert torch.empty(5, dtype=kind).float().isnan().all()
        assert (torch.empty(5, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
