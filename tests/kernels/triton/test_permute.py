"""group_ranks, permute and unpermute: bit for bit, for any way in which pairs fall on slots."""

import pytest
import torch

from moe_runtime.kernels.group_ranks.reference import group_ranks as ranks_reference
from moe_runtime.kernels.permute import reference
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import ROWS, generator, normal, poisoned

module, ranking = interpreted("permute"), interpreted("group_ranks")
SLOTS = 6


def slot_ids(tokens: int, top_k: int, kind: str) -> torch.Tensor:
    """Distinct slots per token, or dropped pairs and empty slots, or everything in slot 2."""
    gen = generator(tokens)
    if kind == "spread":
        return torch.rand(tokens, SLOTS, generator=gen).argsort(1)[:, :top_k]
    if kind == "dropped":
        return torch.randint(-1, 3, (tokens, top_k), generator=gen)
    return torch.full((tokens, top_k), 2)


@pytest.mark.parametrize("few", [0, 8192], ids=["many", "few"])
def test_group_ranks(few, monkeypatch):
    monkeypatch.setattr(ranking, "FEW", few)
    for count in (*ROWS, 700):
        ids = torch.randint(-1, SLOTS, (count,), generator=generator(count))
        for limit in (None, torch.tensor([count // 2], dtype=torch.int32)):
            with poisoned():
                ranks, counts = ranking.group_ranks(ids, SLOTS, limit=limit)
            want_ranks, want_counts = ranks_reference(ids, SLOTS, limit=limit)
            assert torch.equal(ranks, want_ranks)
            assert torch.equal(counts, want_counts)
            assert counts.sum() == (ids[: len(ids) if limit is None else int(limit)] >= 0).sum()


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [(t, k) for t in ROWS for k in ("spread", "dropped", "one slot") if t != 128 or k == "dropped"],
)
def test_permute_and_back(tokens, kind):
    top_k, hidden = 3, 80
    x, ids = normal(tokens, hidden, dtype=torch.bfloat16), slot_ids(tokens, top_k, kind)
    # The interpreter takes its time per token: many of them in one way only.
    for alignment, fixed in ((1, False), (16, False), (16, True))[2 * (tokens > 7) :]:
        capacity = reference.row_capacity(tokens * top_k, SLOTS, alignment) if fixed else None
        with poisoned():
            got = module.permute(x, ids, SLOTS, alignment=alignment, capacity=capacity)
        want = reference.permute(x, ids, SLOTS, alignment=alignment, capacity=capacity)
        end = int(((want[3] + alignment - 1) // alignment * alignment).sum())
        assert got[0].shape == want[0].shape
        assert torch.equal(got[0][:end], want[0][:end])
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        assert (got[2] % alignment == 0).all()
    y, weights = normal(end, hidden, seed=1, dtype=torch.bfloat16), normal(tokens, top_k, seed=2)
    with poisoned():
        back = module.unpermute(y, got[1], weights)
    assert torch.equal(back, reference.unpermute(y, got[1], weights))


def test_rows_of_any_type_and_odd_length():
    ids = slot_ids(5, 2, "spread")
    for x in (
        normal(5, 33, dtype=torch.bfloat16),
        normal(5, 128).to(torch.float8_e4m3fn),
        normal(5, 40)[:, 1:38:2],
        normal(5, 9),
    ):
        with poisoned():
            got = module.permute(x, ids, SLOTS)[0]
        assert torch.equal(got.view(torch.uint8), reference.permute(x, ids, SLOTS)[0].view(torch.uint8))


def test_a_token_does_not_feel_the_others():
    """Bitwise, alone and among others: sums in the order of k in fp32, whatever rows lie where."""
    y, weights, rows = (
        normal(24 * 4, 96),
        normal(24, 4),
        torch.randperm(24 * 4, generator=generator()).view(24, 4),
    )
    together = module.unpermute(y, rows, weights)
    alone = module.unpermute(y, rows[17:18], weights[17:18])
    assert torch.equal(alone[0], together[17])
