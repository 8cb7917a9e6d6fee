"""mla_decode under the interpreter against dense attention in float64, and bit for bit against itself."""

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.kv_write.reference import kv_write
from moe_runtime.kernels.paged import latent
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import ROWS, normal, poisoned, relative_error
from tests.kernels.triton.paged import BLOCKS, Paged, dense, paged

mla_decode = interpreted("mla_decode")
plans = interpreted("paged")

NOPE, ROPE, RANK, V = 16, 16, 64, 16
SCALE = 0.2


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    monkeypatch.setattr(mla_decode, "SPLIT_TOKENS", 64)


def queries(rows: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries, a view with strides of its own, and kv_b_proj."""
    wide = normal(rows, heads, NOPE + ROPE + 16, seed=1, dtype=dtype)
    kv_b = normal(heads * (NOPE + V), RANK, seed=2) / RANK**0.5
    return wide[..., : NOPE + ROPE], kv_b.to(dtype)


def decode(cache: Paged, q_DAQ: Tensor, kv_b: Tensor, rows: list[int] | None = None) -> Tensor:
    chosen = q_DAQ if rows is None else q_DAQ[rows]
    out_DX = torch.full((len(chosen), q_DAQ.shape[1] * V), torch.nan, dtype=q_DAQ.dtype)
    with poisoned():
        mla_decode.mla_decode(chosen, cache.cache_BSE, cache.plan(plans, rows), kv_b, SCALE, out_DX=out_DX)
    return out_DX


def oracle(cache: Paged, q_DAQ: Tensor, kv_b: Tensor) -> Tensor:
    """Absorbed, in float64; absorbed queries and latents are of the queries' type, as in the reference."""
    heads, dtype, rows = q_DAQ.shape[1], q_DAQ.dtype, []
    w_uk, w_uv = kv_b.double().view(heads, NOPE + V, RANK).split([NOPE, V], 1)
    for q_AQ, entries in zip(q_DAQ, cache.entries, strict=True):
        q_AR = torch.einsum("an,anr->ar", q_AQ[:, :NOPE].double(), w_uk).to(dtype)
        k_CAE = entries[:, None].expand(-1, heads, -1)
        q_1AE = torch.cat((q_AR, q_AQ[:, NOPE:]), 1)[None]
        latent_1AR = dense(q_1AE, k_CAE, k_CAE[..., :RANK], SCALE, context=len(entries) - 1)
        rows.append(torch.einsum("ar,avr->av", latent_1AR[0].to(dtype).double(), w_uv).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("dtype", "packed", "tolerance"),
    [
        (torch.float32, False, 1e-6),
        (torch.bfloat16, False, 4e-3),
        (torch.float32, True, 1e-6),  # what the cache holds is exact in either type
        (torch.bfloat16, True, 4e-3),
    ],
)
@pytest.mark.parametrize("block_tokens", BLOCKS)
def test_all_contexts(dtype, packed, tolerance, block_tokens):
    cache = paged(ROWS, RANK + ROPE, block_tokens, dtype, packed_rank=RANK * packed)
    q_DAQ, kv_b = queries(len(ROWS), 4, dtype)
    out_DX = decode(cache, q_DAQ, kv_b)
    assert relative_error(out_DX, oracle(cache, q_DAQ, kv_b)) <= tolerance
    assert not out_DX[ROWS.index(0)].any()


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_does_not_depend_on_its_batch(packed):
    cache = paged((129, 3, 65), RANK + ROPE, 16, torch.bfloat16, packed_rank=RANK * packed)
    q_DAQ, kv_b = queries(3, 2, torch.bfloat16)
    together = decode(cache, q_DAQ, kv_b)
    for rows in ([0], [2, 1]):
        assert torch.equal(decode(cache, q_DAQ, kv_b, rows), together[rows])


def test_heads_that_do_not_fill_their_tiles():
    cache = paged((40,), RANK + ROPE, 64, torch.bfloat16)
    q_DAQ, kv_b = queries(1, 20, torch.bfloat16)
    assert relative_error(decode(cache, q_DAQ, kv_b), oracle(cache, q_DAQ, kv_b)) <= 4e-3


def test_no_rows():
    cache = paged((16,), RANK + ROPE, 16, torch.float32)
    q_DAQ, kv_b = queries(1, 4, torch.float32)
    assert decode(cache, q_DAQ, kv_b, []).shape == (0, 4 * V)


def test_every_group_of_a_packed_latent_has_its_scale():
    """Against the same values in a plain cache, which holds them exactly; groups 64 times apart."""
    rank, tokens = 512, 20
    sizes = 4.0 ** torch.tensor([0, -3, 3, -1]).repeat_interleave(128)
    entries = normal(tokens, rank + ROPE, seed=3) * torch.cat((sizes, torch.ones(ROPE))) / 64
    packed = torch.full((2, 16, latent.row_bytes(rank, ROPE)), 255, dtype=torch.uint8)
    kv_write(packed, torch.arange(tokens), entries)
    plain = latent.unpack(packed.flatten(0, 1), rank).view(2, 16, -1)
    plan = plans.plan_decode(
        torch.tensor([[0, 1]]), torch.tensor([tokens]), max_context=tokens, block_tokens=16
    )
    kv_b = normal(NOPE + V, rank, seed=2) / rank**0.5
    outputs = []
    for cache in (packed, plain):
        outputs.append(torch.full((1, V), torch.nan))
        mla_decode.mla_decode(normal(1, 1, NOPE + ROPE), cache, plan, kv_b, SCALE, out_DX=outputs[-1])
    assert relative_error(*outputs) <= 1e-6
