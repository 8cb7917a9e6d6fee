"""silu_mul: plain, clamped and gpt-oss's, from halves and from interleaved columns."""

import pytest
import torch
from torch.nn import functional as F

from moe_runtime.kernels.silu_mul.reference import silu_mul as reference
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import ROWS, normal, poisoned, relative_error

silu_mul = interpreted("silu_mul").silu_mul
VARIANTS = [{}, {"limit": 2.0}, {"kind": "gpt_oss", "limit": 2.0}, {"kind": "gpt_oss"}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_variants(variant, dtype, tolerance, interleaved):
    both = normal(7, 160, dtype=dtype) * 3
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
    with poisoned():
        got = silu_mul(gate, up, **variant)
    want = reference(gate, up, **variant)
    assert got.dtype == dtype
    assert relative_error(got, want) < tolerance


@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(rows):
    gate, up = normal(rows, 96), normal(rows, 96, seed=1)
    with poisoned():
        got = silu_mul(gate, up)
    assert relative_error(got, reference(gate, up)) < 1e-6


def test_masked_rows_are_left_alone():
    gate, up, counts = normal(24, 96), normal(24, 96, seed=1), torch.tensor([0, 8, 3], dtype=torch.int32)
    with poisoned():
        got = silu_mul(gate, up, counts_s=counts)
    real = (torch.arange(8) < counts[:, None]).view(-1)
    assert relative_error(got[real], reference(gate, up)[real]) < 1e-6
    assert got[~real].isnan().all()


def test_the_reference_is_what_the_models_say():
    """gpt-oss: (up + 1) * gate * sigmoid(1.702 gate) after clamping at 7; DeepSeek-V4 clamps at 10."""
    gate, up = torch.tensor([-20.0, -1.0, 3.0, 9.0, 30.0]), torch.tensor([-20.0, 2.0, 8.0, -9.0, 11.0])
    g, u = gate.double().clamp(max=7.0), up.double().clamp(-7.0, 7.0)
    want = (u + 1) * g * torch.sigmoid(1.702 * g)
    torch.testing.assert_close(reference(gate, up, kind="gpt_oss", limit=7.0).double(), want)
    g, u = gate.double().clamp(max=10.0), up.double().clamp(-10.0, 10.0)
    torch.testing.assert_close(reference(gate, up, limit=10.0).double(), F.silu(g) * u)
