"""rms_norm, rope and mla_assemble: strided views, in place, residuals, and cache entries."""

import pytest
import torch

from moe_runtime.kernels.mla_assemble.reference import mla_assemble as assemble_reference
from moe_runtime.kernels.rms_norm.reference import rms_norm as norm_reference
from moe_runtime.kernels.rope.reference import rope as rope_reference
from moe_runtime.kernels.rope.reference import rope_table
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import ROWS, generator, normal, poisoned, relative_error

rms_norm = interpreted("rms_norm").rms_norm
rope = interpreted("rope").rope
mla_assemble = interpreted("mla_assemble").mla_assemble
DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)]  # bf16: the reference rounds twice as well


def table(rows: int, dim: int, interleaved: bool) -> torch.Tensor:
    whole = rope_table(dim=dim, max_positions=200, theta=1e4, interleaved=interleaved, cos_sin_scale=1.2)
    return whole[torch.randint(0, 200, (rows,), generator=generator(rows))]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_norm(rows, dtype, tolerance):
    x, weight = normal(rows, 80, dtype=dtype), normal(80, seed=1, dtype=dtype)
    with poisoned():
        got = rms_norm(x, weight, 1e-6)
    assert relative_error(got, norm_reference(x, weight, 1e-6)) < tolerance
    residual, want_residual = normal(rows, 80, seed=2, dtype=dtype), normal(rows, 80, seed=2, dtype=dtype)
    got = rms_norm(x, weight, 1e-6, residual=residual)
    want = norm_reference(x, weight, 1e-6, residual=want_residual)
    assert torch.equal(residual, want_residual)
    assert relative_error(got, want) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_norm_of_views_in_place(dtype, tolerance):
    """A latent inside a wider product, and heads inside one."""
    wide, weight = normal(7, 3 * 48, dtype=dtype), normal(32, seed=1, dtype=dtype)
    for view in (lambda w: w[:, 16:48], lambda w: w.view(7, 3, 48)[:, 1:, :32]):
        mine, theirs = wide.clone(), wide.clone()
        rms_norm(view(mine), weight, 1e-5, out=view(mine))
        norm_reference(view(theirs), weight, 1e-5, out=view(theirs))
        assert relative_error(mine, theirs) < tolerance
        view(mine).zero_()
        view(theirs).zero_()
        assert torch.equal(mine, theirs)
    tiny = torch.full((2, 32), 1e-4)
    assert (
        relative_error(rms_norm(tiny, torch.ones(32), 1e-6), norm_reference(tiny, torch.ones(32), 1e-6))
        < 1e-6
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(0, 3, 16), (1, 1, 64), (7, 20, 24)])
def test_rope(rows, heads, dim, dtype, tolerance, interleaved):
    check_rope(rows, heads, dim, dtype, tolerance, interleaved)


def test_rope_of_many_rows():
    check_rope(129, 3, 8, torch.bfloat16, 4e-3, True)


def check_rope(rows, heads, dim, dtype, tolerance, interleaved):
    x = normal(rows, heads, dim + 5, dtype=dtype)
    mine, theirs = x.clone(), x.clone()
    cos_sin = table(rows, dim, interleaved)
    rope(mine[..., 3 : 3 + dim], cos_sin, interleaved=interleaved)
    rope_reference(theirs[..., 3 : 3 + dim], cos_sin, interleaved=interleaved)
    assert relative_error(mine, theirs) < tolerance
    assert torch.equal(mine[..., :3], x[..., :3])
    assert torch.equal(mine[..., 3 + dim :], x[..., 3 + dim :])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_mla_assemble(dtype, tolerance, interleaved):
    """Queries in place, entries at their places in the cache, and nothing else touched."""
    rows, heads, nope, rank, dim = 7, 20, 16, 48, 8
    q, product = normal(rows, heads, nope + dim, dtype=dtype), normal(rows, 100, seed=1, dtype=dtype)
    weight, cos_sin = normal(rank, seed=2, dtype=dtype), table(rows, dim, interleaved)
    places = torch.randperm(5 * 4, generator=generator(3))[:rows]
    results = []
    for assemble in (mla_assemble, assemble_reference):
        mine = q.clone()
        cache = torch.full((5, 4, rank + dim), torch.nan, dtype=dtype)
        entries = product.clone()[:, 10 : 10 + rank + dim]
        assemble(mine, entries, weight, cos_sin, cache, places, eps=1e-6, interleaved=interleaved)
        results.append((mine, cache.view(20, -1)))
    (q_mine, cache_mine), (q_want, cache_want) = results
    assert relative_error(q_mine, q_want) < tolerance
    assert torch.equal(q_mine[..., :nope], q[..., :nope])
    assert relative_error(cache_mine[places], cache_want[places]) < tolerance
    assert torch.equal(cache_mine.isnan(), cache_want.isnan())
