"""Paged attention kernels against dense attention in float64 over scattered, poisoned blocks."""

from typing import Any

import pytest
import torch

from moe_runtime.kernels.paged import cpu as paged_cpu
from moe_runtime.kernels.paged import latent
from moe_runtime.kernels.registry import select
from moe_runtime.models.context import PrefillSegment

S = 4  # block tokens
HEADS, NOPE, ROPE, RANK, V = 4, 6, 2, 10, 5
SCALE = 0.3
F32: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged(lengths, entry, seed=0):
    """A NaN cache with sequences of the given lengths in scattered blocks: cache, tables, entries."""
    cache = torch.full((64, S, entry), torch.nan)
    free = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()
    tables, entries = [], []
    for i, length in enumerate(lengths):
        table = [free.pop() for _ in range(-(-length // S))]
        values = randn(length, entry, seed=100 + i)
        for p in range(length):
            cache[table[p // S], p % S] = values[p]
        tables.append(table)
        entries.append(values)
    return cache, tables, entries


def dense(q, k, v, context):
    """float64 [n, A, V]: q [n, A, Q], k [C, A, Q], v [C, A, V]; row i sees the first context + i + 1."""
    scores = torch.einsum("naq,caq->anc", q.double(), k.double()) * SCALE
    ahead = torch.arange(len(k)) > context + torch.arange(len(q))[:, None]
    return torch.einsum("anc,cav->nav", scores.masked_fill(ahead, -torch.inf).softmax(-1), v.double())


def mla_dense(q, entries, kv_b, context):
    kv = (entries[:, :RANK].double() @ kv_b.double().T).view(-1, HEADS, NOPE + V)
    rope = entries[:, None, RANK:].double().expand(-1, HEADS, -1)
    return dense(q, torch.cat((kv[..., :NOPE], rope), -1), kv[..., NOPE:], context).flatten(1)


def gqa_dense(q, entries, kv_heads, head_dim, context):
    k, v = entries.view(len(entries), 2, kv_heads, head_dim).unbind(1)
    group = HEADS // kv_heads
    return dense(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), context).flatten(1)


LENGTHS = [[1], [7, 7, 8], [1, 30, 4, 29, 17, 3], [5] * 9]


@pytest.fixture(params=["cpu", "cpu_invariant", "any"])
def device(request, monkeypatch):
    # Small limits, so that a few sequences already make several groups.
    monkeypatch.setattr(paged_cpu, "GROUP_ENTRIES", 40)
    monkeypatch.setattr(paged_cpu, "PREFILL_ENTRIES", 24)
    return request.param


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_decode(device, lengths):
    for kind in ("mla", "gqa"):
        entry, head, width = (RANK + ROPE, NOPE + ROPE, V) if kind == "mla" else (2 * 2 * 6, 6, 6)
        cache, tables, entries = paged(lengths, entry)
        blocks = max(len(t) for t in tables)
        plan = select("plan_decode", device)(
            torch.tensor([t + [0] * (blocks - len(t)) for t in tables]),
            torch.tensor(lengths),
            max_context=max(lengths),
            block_tokens=S,
        )
        q, out = (
            randn(len(lengths), HEADS, head, seed=1),
            torch.full((len(lengths), HEADS * width), torch.nan),
        )
        if kind == "mla":
            kv_b = randn(HEADS * (NOPE + V), RANK, seed=2)
            select("mla_decode", device)(q, cache, plan, kv_b, SCALE, out_DX=out)
            want = [mla_dense(q[i : i + 1], e, kv_b, len(e) - 1) for i, e in enumerate(entries)]
        else:
            select("gqa_decode", device)(q, cache, plan, SCALE, out_DX=out)
            want = [gqa_dense(q[i : i + 1], e, 2, 6, len(e) - 1) for i, e in enumerate(entries)]
        torch.testing.assert_close(out, torch.cat(want).float(), **F32)


@pytest.mark.parametrize(
    "chunks",
    [[(0, 1)], [(0, 5), (3, 4), (8, 1)], [(0, 30), (21, 9), (0, 4), (1, 13)], [(6, 2), (0, 7), (2, 3)]],
    ids=str,
)
@pytest.mark.parametrize("query_block", [4, 128])
def test_prefill(device, chunks, query_block, monkeypatch):
    monkeypatch.setattr(paged_cpu, "QUERY_BLOCK", query_block)
    before = 2  # decode rows in front, which prefill must leave alone
    for kind in ("mla", "gqa"):
        entry, head, width = (RANK + ROPE, NOPE + ROPE, V) if kind == "mla" else (2 * 2 * 6, 6, 6)
        cache, tables, entries = paged([c + n for c, n in chunks], entry)
        rows, segments = before, []
        for (context, n), table in zip(chunks, tables, strict=True):
            # A table may be longer than what is written so far.
            blocks = torch.tensor([*table, 63])
            segments.append(PrefillSegment(start=rows, stop=rows + n, context=context, blocks=blocks))
            rows += n
        plan = select("plan_prefill", device)(segments, block_tokens=S)
        q, out = randn(rows, HEADS, head, seed=1), torch.full((rows, HEADS * width), 7.0)
        want = [torch.full((before, HEADS * width), 7.0, dtype=torch.float64)]
        if kind == "mla":
            kv_b = randn(HEADS * (NOPE + V), RANK, seed=2)
            select("mla_prefill", device)(q, cache, plan, kv_b, SCALE, out_TX=out)
            want += [
                mla_dense(q[s.start : s.stop], e, kv_b, s.context)
                for s, e in zip(segments, entries, strict=True)
            ]
        else:
            select("gqa_prefill", device)(q, cache, plan, SCALE, out_TX=out)
            want += [
                gqa_dense(q[s.start : s.stop], e, 2, 6, s.context)
                for s, e in zip(segments, entries, strict=True)
            ]
        torch.testing.assert_close(out, torch.cat(want).float(), **F32)


def test_decode_groups_pad_little_and_cover_every_row_once(monkeypatch):
    monkeypatch.setattr(paged_cpu, "GROUP_ENTRIES", 2048)
    lengths = torch.randint(1, 600, (50,), generator=torch.Generator().manual_seed(0))
    blocks = torch.arange(50)[:, None] * 200 + torch.arange(150)
    plan = paged_cpu.plan_decode(blocks, lengths, max_context=int(lengths.max()), block_tokens=S)
    members = torch.cat([g.members for g in plan if g.members is not None])
    assert sorted(members.tolist()) == list(range(50))
    assert sum(len(g.rows) for g in plan) <= lengths.sum() / paged_cpu.MIN_FILL


def test_kv_write():
    cache = torch.zeros(3, 4, 2)
    select("kv_write", "cpu")(cache, torch.tensor([5, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert cache[1, 1].tolist() == [1.0, 2.0]
    assert cache[0, 0].tolist() == [3.0, 4.0]
    assert cache.sum() == 10


@pytest.mark.parametrize("device", ["cpu", "any"], indirect=True)
@pytest.mark.parametrize("window", [0, 1, 6, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gqa_with_a_window_and_sinks(device, window, with_sinks):
    lengths, chunks = [1, 9, 30, 29], [(0, 5), (21, 9)]
    sinks = randn(HEADS, seed=5) if with_sinks else None
    options = {"window": window, "sinks_A": sinks}

    def want(q, entries, context):
        k, v = entries.double().view(len(entries), 2, 2, 6).unbind(1)
        scores = torch.einsum("naq,caq->anc", q.double(), k.repeat_interleave(2, 1)) * SCALE
        behind = context + torch.arange(len(q))[:, None] - torch.arange(len(k))
        hidden = (behind < 0) | ((behind >= window) if window else False)
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
        return torch.einsum("anc,cav->nav", weights / total, v.repeat_interleave(2, 1)).flatten(1)

    cache, tables, entries = paged(lengths, 2 * 2 * 6)
    plan = select("plan_decode", device)(
        torch.tensor([t + [0] * (8 - len(t)) for t in tables]),
        torch.tensor(lengths),
        max_context=max(lengths),
        block_tokens=S,
    )
    q, out = randn(4, HEADS, 6, seed=1), torch.full((4, HEADS * 6), torch.nan)
    select("gqa_decode", device)(q, cache, plan, SCALE, out_DX=out, **options)
    wanted = [want(q[i : i + 1], e, len(e) - 1) for i, e in enumerate(entries)]
    torch.testing.assert_close(out, torch.cat(wanted).float(), **F32)

    cache, tables, entries = paged([c + n for c, n in chunks], 2 * 2 * 6)
    segments = [
        PrefillSegment(start=s, stop=s + n, context=c, blocks=torch.tensor(t))
        for s, (c, n), t in zip((0, 5), chunks, tables, strict=True)
    ]
    plan = select("plan_prefill", device)(segments, block_tokens=S)
    q, out = randn(14, HEADS, 6, seed=1), torch.full((14, HEADS * 6), torch.nan)
    select("gqa_prefill", device)(q, cache, plan, SCALE, out_TX=out, **options)
    wanted = [want(q[s.start : s.stop], e, s.context) for s, e in zip(segments, entries, strict=True)]
    torch.testing.assert_close(out, torch.cat(wanted).float(), **F32)


@pytest.mark.parametrize("device", ["cpu", "any"], indirect=True)
def test_mla_over_a_packed_cache(device):
    rank, rope, lengths = 16, 4, [1, 9, 30]
    slots = [torch.arange(32 * i, 32 * i + n) for i, n in enumerate(lengths)]
    cache = torch.full((24, S, latent.row_bytes(rank, rope)), 255, dtype=torch.uint8)
    for i, at in enumerate(slots):
        select("kv_write", device)(cache, at, randn(len(at), rank + rope, seed=i))
    plain = latent.unpack(cache.flatten(0, 1), rank).view(24, S, -1)
    q, kv_b = randn(3, HEADS, NOPE + rope, seed=8), randn(HEADS * (NOPE + V), rank, seed=9)
    blocks = torch.arange(24).view(3, 8)
    plan = select("plan_decode", device)(blocks, torch.tensor(lengths), max_context=30, block_tokens=S)
    got, want = torch.empty(3, HEADS * V), torch.empty(3, HEADS * V)
    for entries, out in ((cache, got), (plain, want)):
        select("mla_decode", device)(q, entries, plan, kv_b, SCALE, out_DX=out)
    assert torch.equal(got, want)
    segment = PrefillSegment(start=0, stop=3, context=27, blocks=blocks[2])
    plan = select("plan_prefill", device)([segment], block_tokens=S)
    for entries, out in ((cache, got), (plain, want)):
        select("mla_prefill", device)(q, entries, plan, kv_b, SCALE, out_TX=out)
    assert torch.equal(got, want)
