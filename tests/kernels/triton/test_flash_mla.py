"""The FlashMLA adapter against a module that asserts the library's contract and computes densely."""

import sys
from types import ModuleType

import pytest
import torch

from moe_runtime.kernels.errors import KernelError
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import normal, relative_error
from tests.kernels.triton.paged import dense, expanded, paged

interpreted("mla_decode")  # before the adapter imports it
from moe_runtime.kernels.mla_decode import flash_mla  # noqa: E402

HEADS, NOPE, V = 2, 16, 16
SCALE = 0.1


class Schedule:
    """What `get_mla_metadata` of 2026 gives: filled by the first call, good for equal lengths only."""

    lengths: torch.Tensor | None = None


def fake(two_tensors: bool) -> ModuleType:
    """`flash_mla` in the form of 2025 (two tensors of metadata) or 2026 (one object)."""
    module = ModuleType("flash_mla")
    module.calls = []  # type: ignore[attr-defined]

    def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
        assert cache_seqlens.dtype == torch.int32
        assert (num_heads_per_head_k, num_heads_k) == (HEADS, 1)
        module.calls.append("metadata")
        if two_tensors:
            splits = torch.arange(len(cache_seqlens) + 1, dtype=torch.int32)
            return torch.zeros(132, 8, dtype=torch.int32), splits
        return Schedule(), None

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
    ):
        module.calls.append("attend")
        D = len(q)
        assert q.shape == (D, 1, HEADS, 576)
        assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1
        assert k_cache.shape[1:] == (64, 1, 576)
        assert q.dtype == k_cache.dtype == torch.bfloat16
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        assert cache_seqlens.is_contiguous()
        assert head_dim_v == 512
        assert not causal
        if two_tensors:
            assert tile_scheduler_metadata.dtype == num_splits.dtype == torch.int32
            assert num_splits.shape == (D + 1,)
        else:
            assert num_splits is None
            known = tile_scheduler_metadata.lengths
            assert known is None or torch.equal(known, cache_seqlens)
            tile_scheduler_metadata.lengths = cache_seqlens
        out = torch.empty(D, 1, HEADS, 512, dtype=q.dtype)
        for row, length in enumerate(cache_seqlens.tolist()):
            blocks = block_table[row, : -(-length // 64)].long()
            keys = k_cache[blocks].reshape(-1, 1, 576)[:length].expand(-1, HEADS, -1).double()
            out[row] = dense(q[row], keys, keys[..., :512], softmax_scale, context=length - 1)
        return out, torch.zeros(D, HEADS, 1)

    module.get_mla_metadata = get_mla_metadata  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("two_tensors", [True, False])
def test_two_layers_of_a_step(two_tensors, monkeypatch):
    module = fake(two_tensors)
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    cache = paged((70, 3), 576, 64, torch.bfloat16)
    library = flash_mla.load()
    plan = cache.plan(library)
    kv_b = (normal(HEADS * (NOPE + V), 512, seed=2) / 512**0.5).bfloat16()
    for layer in range(2):
        q_DAQ = normal(2, HEADS, NOPE + 64, seed=3 + layer, dtype=torch.bfloat16)
        out_DX = torch.full((2, HEADS * V), torch.nan, dtype=torch.bfloat16)
        library.mla_decode(q_DAQ, cache.cache_BSE, plan, kv_b, SCALE, out_DX=out_DX)
        want = [
            dense(q[None], *expanded(e, kv_b, NOPE, HEADS), SCALE, context=len(e) - 1).flatten(1)
            for q, e in zip(q_DAQ, cache.entries, strict=True)
        ]
        assert relative_error(out_DX, torch.cat(want)) <= 4e-3
    assert module.calls == ["metadata", "attend", "attend"]


def test_refusals(monkeypatch):
    table, lengths = torch.zeros(1, 1), torch.ones(1)
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    with pytest.raises(KernelError, match="install FlashMLA"):
        flash_mla.load()
    other = ModuleType("flash_mla")
    other.flash_mla_with_kvcache = lambda q, kv: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", other)
    with pytest.raises(KernelError, match="flash_mla_with_kvcache takes q, kv; expected q, k_cache"):
        flash_mla.load()
    monkeypatch.setitem(sys.modules, "flash_mla", fake(two_tensors=False))
    library = flash_mla.load()
    with pytest.raises(KernelError, match="block_tokens is 16, FlashMLA takes 64"):
        library.plan_decode(table, lengths, max_context=1, block_tokens=16)
    plan = library.plan_decode(table, lengths, max_context=1, block_tokens=64)
    cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    q_DAQ, out_DX = torch.zeros(1, 2, 80), torch.zeros(1, 32)
    with pytest.raises(KernelError, match="the cache is torch.uint8"):
        library.mla_decode(q_DAQ, cache, plan, torch.zeros(64, 512), 1.0, out_DX=out_DX)
