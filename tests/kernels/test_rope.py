"""rope against rotations in double precision, its table against transformers' YaRN."""

import math
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_runtime.kernels.registry import select
from moe_runtime.kernels.rope.reference import inverse_frequencies, rope_table

PLAIN: dict[str, Any] = {
    "factor": 1.0,
    "original_max_positions": 0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}


@pytest.mark.parametrize("device", ["cpu", "any"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_rotates_in_place(device, interleaved, dtype):
    dim, heads = 8, 3
    table = rope_table(dim=dim, max_positions=100, theta=10000.0, interleaved=interleaved, cos_sin_scale=1.5)
    positions = torch.tensor([0, 1, 57, 99])
    gen = torch.Generator().manual_seed(1)
    whole = torch.randn(4, heads, dim + 5, generator=gen).to(dtype)
    want = whole.double()
    for t, p in enumerate(positions.tolist()):
        for i in range(dim // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
            angle = p * 10000.0 ** (-2 * i / dim)
            cos, sin = 1.5 * math.cos(angle), 1.5 * math.sin(angle)
            x, y = whole[t, :, a].double(), whole[t, :, b].double()
            want[t, :, a], want[t, :, b] = x * cos - y * sin, y * cos + x * sin
    for offset in (0, 1):  # an odd offset or stride cannot be viewed as complex numbers
        x = torch.cat((torch.zeros(4, heads, offset, dtype=dtype), whole), -1)
        select("rope", device)(x[..., offset : offset + dim], table[positions], interleaved=interleaved)
        tolerance: dict[str, Any] = (
            {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.02}
        )
        torch.testing.assert_close(x[..., offset:], want.to(dtype), **tolerance)
    empty = torch.zeros(0, heads, dim, dtype=dtype)
    select("rope", device)(empty, table[:0], interleaved=interleaved)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("dim", "original", "factor"), [(64, 4096, 40.0), (8, 256, 16.0), (64, 4096, 1.5)])
def test_yarn_is_that_of_transformers(dim, original, factor, truncate):
    config = DeepseekV3Config(
        qk_rope_head_dim=dim,
        max_position_embeddings=int(original * factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": truncate,
        },
    )
    want, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    how: dict[str, Any] = {
        "original_max_positions": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": truncate,
    }
    got = inverse_frequencies(dim=dim, theta=10000.0, factor=factor, **how)
    assert torch.equal(got, want)
    plain = inverse_frequencies(dim=dim, theta=10000.0, **PLAIN)
    assert not torch.equal(got, plain)
