"""gqa_decode under the interpreter against dense attention in float64, and bit for bit against itself."""

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import ROWS, normal, poisoned, relative_error
from tests.kernels.triton.paged import BLOCKS, Paged, dense, grouped, paged

gqa_decode = interpreted("gqa_decode")
plans = interpreted("paged")

HEADS, KV_HEADS, DIM = 12, 2, 32
SCALE = 0.2


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    monkeypatch.setattr(gqa_decode, "SPLIT_TOKENS", 64)


def decode(cache: Paged, q_DAd: Tensor, rows: list[int] | None = None, **options) -> Tensor:
    chosen = q_DAd if rows is None else q_DAd[rows]
    out_DX = torch.full((len(chosen), HEADS * DIM), torch.nan, dtype=q_DAd.dtype)
    with poisoned():
        gqa_decode.gqa_decode(
            chosen, cache.cache_BSE, cache.plan(plans, rows), SCALE, out_DX=out_DX, **options
        )
    return out_DX


def oracle(cache: Paged, q_DAd: Tensor, **options) -> Tensor:
    rows = []
    for q_Ad, entries in zip(q_DAd, cache.entries, strict=True):
        k, v = grouped(entries, HEADS, DIM)
        rows.append(dense(q_Ad[None], k, v, SCALE, context=len(entries) - 1, **options).flatten(1))
    return torch.cat(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("block_tokens", BLOCKS)
def test_all_contexts(dtype, tolerance, block_tokens):
    cache = paged(ROWS, 2 * KV_HEADS * DIM, block_tokens, dtype)
    q_DAd = normal(len(ROWS), HEADS, DIM, seed=1, dtype=dtype)
    out_DX = decode(cache, q_DAd)
    assert relative_error(out_DX, oracle(cache, q_DAd)) <= tolerance
    assert not out_DX[ROWS.index(0)].any()


@pytest.mark.parametrize(
    ("window", "with_sinks"), [(0, True), (1, False), (60, False), (100, True), (1000, False)]
)
def test_window_and_sinks(window, with_sinks):
    cache = paged((1, 64, 161), 2 * KV_HEADS * DIM, 16, torch.float32)
    q_DAd = normal(3, HEADS, DIM, seed=1)
    sinks_A = normal(HEADS, seed=2) if with_sinks else None
    out_DX = decode(cache, q_DAd, window=window, sinks_A=sinks_A)
    assert relative_error(out_DX, oracle(cache, q_DAd, window=window, sinks_A=sinks_A)) <= 1e-6


@pytest.mark.parametrize("window", [0, 70])
def test_a_row_does_not_depend_on_its_batch(window):
    cache = paged((129, 3, 65), 2 * KV_HEADS * DIM, 16, torch.bfloat16)
    q_DAd = normal(3, HEADS, DIM, seed=1, dtype=torch.bfloat16)
    together = decode(cache, q_DAd, window=window)
    for rows in ([0], [2, 1]):
        assert torch.equal(decode(cache, q_DAd, rows, window=window), together[rows])
