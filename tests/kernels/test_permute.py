"""permute and unpermute against plain loops, and their CPU paths bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.kernels.permute import cpu, reference

SLOTS = 5
ids_lists = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.integers(-1, SLOTS - 1), min_size=k, max_size=k), max_size=9).map(
        lambda rows: torch.tensor(rows, dtype=torch.int64).view(-1, k)
    )
)


@settings(max_examples=150, deadline=None)
@given(ids_lists, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**31))
def test_permute_and_unpermute(slot_ids, dtype, seed):
    T, K = slot_ids.shape
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(T, 6, generator=gen).to(dtype)
    pairs = sorted((s, t, k) for t, row in enumerate(slot_ids.tolist()) for k, s in enumerate(row) if s >= 0)
    for module in (reference, cpu):
        rows_x, rows, starts, counts = module.permute(x, slot_ids, SLOTS)
        assert starts.dtype == counts.dtype == torch.int32
        assert counts.tolist() == [sum(s == slot for s, _, _ in pairs) for slot in range(SLOTS)]
        assert starts.tolist() == [sum(counts[:slot].tolist()) for slot in range(SLOTS)]
        assert torch.equal(rows_x, x[[t for _, t, _ in pairs]])
        want = torch.full((T, K), -1)
        for n, (_, t, k) in enumerate(pairs):
            want[t, k] = n
        assert torch.equal(rows, want)

    y = torch.randn(len(pairs), 6, generator=gen).to(dtype)
    weights = torch.randn(T, K, generator=gen)
    want = torch.zeros(T, 6)
    for t in range(T):
        for k in range(K):
            if rows[t, k] >= 0:
                want[t] += y[rows[t, k]].float() * weights[t, k]
    for module in (reference, cpu):
        out = module.unpermute(y, rows, weights)
        assert out.dtype == dtype
        assert torch.equal(out, want.to(dtype))


@pytest.mark.parametrize("hidden", [32, 33, 512])
def test_a_token_does_not_feel_the_others(hidden):
    """Bitwise: the same rows and weights alone, at other places, and with more threads."""
    gen = torch.Generator().manual_seed(3)
    y, weights = torch.randn(64 * 4, hidden, generator=gen), torch.rand(64, 4, generator=gen)
    rows = torch.randperm(64 * 4, generator=gen).view(64, 4)
    together = cpu.unpermute(y, rows, weights)
    order = torch.randperm(64 * 4, generator=gen)
    moved = torch.empty_like(y)
    moved[order] = y
    assert torch.equal(cpu.unpermute(moved, order[rows], weights), together)
    for t in (0, 17, 63):
        alone = cpu.unpermute(y[rows[t]], torch.arange(4)[None], weights[t : t + 1])
        assert torch.equal(alone[0], together[t])


def test_a_capacity_larger_than_the_rows():
    """As large as all pairs, some of which are dropped: rows are found by their places, not by counting."""
    x, ids = torch.randn(4, 6), torch.tensor([[0, -1], [2, 0], [-1, -1], [2, 2]])
    want = reference.permute(x, ids, SLOTS)
    weights = torch.rand(4, 2)
    for module in (reference, cpu):
        got = module.permute(x, ids, SLOTS, capacity=8)
        assert got[0].shape == (8, 6)
        assert torch.equal(got[0][:5], want[0])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got[1:], want[1:], strict=True))
        assert torch.equal(module.unpermute(*got[:2], weights), reference.unpermute(*want[:2], weights))
