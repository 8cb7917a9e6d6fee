"""group_ranks on a GPU: one launch for few ids, three for many; no atomics, so always the same ranks.

P ids, G groups, B blocks. Few: a program per group reads all ids. Many: blocks rank within themselves
(each id against each) and leave their counts, which are added up over the blocks, then onto the ranks.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.aot.case import AotCase, Target

FEW = 8192  # ids up to which reading them once per group costs less than two more launches
CHUNK = 1024
BLOCK = 128
COLUMNS = 32  # groups per program of the sum over blocks


@triton.jit
def _load_ids(ids_ptr, at, P, limit_ptr, LIMIT: tl.constexpr):
    end = P
    if LIMIT:
        end = tl.minimum(P, tl.load(limit_ptr))
    return tl.load(ids_ptr + at, mask=at < end, other=-1).to(tl.int32)


@triton.jit
def _by_group(ids_ptr, limit_ptr, ranks_ptr, counts_ptr, P, LIMIT: tl.constexpr, CHUNK: tl.constexpr):
    group = tl.program_id(0)
    seen = tl.zeros((), tl.int32)
    for first in tl.range(0, P, CHUNK):
        at = first + tl.arange(0, CHUNK)
        ids = _load_ids(ids_ptr, at, P, limit_ptr, LIMIT)
        mine = (ids == group).to(tl.int32)
        tl.store(ranks_ptr + at, seen + tl.cumsum(mine, 0) - 1, mask=(at < P) & (mine > 0))
        if group == 0:
            tl.store(ranks_ptr + at, tl.full((CHUNK,), -1, tl.int32), mask=(at < P) & (ids < 0))
        seen += tl.sum(mine, 0)
    tl.store(counts_ptr + group, seen)


@triton.jit
def _within_blocks(ids_ptr, limit_ptr, ranks_ptr, counts_ptr, P, G, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Ranks within blocks of ids; counts [B, G] of the blocks, which must be zero before."""
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    at = block * BLOCK + place
    ids = _load_ids(ids_ptr, at, P, limit_ptr, LIMIT)
    same = (ids[:, None] == ids[None, :]) & (ids >= 0)[:, None]
    before = same & (place[None, :] < place[:, None])
    both = tl.sum(same.to(tl.int32) * 65536 + before.to(tl.int32), 1)  # one reduction for two numbers
    rank, count = both & 65535, both >> 16
    tl.store(ranks_ptr + at, tl.where(ids >= 0, rank, -1), mask=at < P)
    last = (ids >= 0) & (rank == count - 1)
    tl.store(counts_ptr + block.to(tl.int64) * G + ids, count, mask=last)


@triton.jit
def _sum_blocks(block_counts_ptr, counts_ptr, B, G, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Counts of blocks [B, G] become those of all blocks before; the totals go to `counts`."""
    group = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for first in tl.range(0, B, ROWS):
        row = first + tl.arange(0, ROWS)
        at = block_counts_ptr + row.to(tl.int64)[:, None] * G + group[None, :]
        inside = (row < B)[:, None] & (group < G)[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + group, total, mask=group < G)


@triton.jit
def _add_blocks(ids_ptr, ranks_ptr, block_counts_ptr, P, G, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ranks_ptr + at, mask=at < P, other=-1)
    ids = tl.load(ids_ptr + at, mask=rank >= 0, other=0).to(tl.int32)
    before = tl.load(block_counts_ptr + block.to(tl.int64) * G + ids, mask=rank >= 0, other=0)
    tl.store(ranks_ptr + at, rank + before, mask=rank >= 0)


def group_ranks(ids_P: Tensor, num_groups: int, *, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the reference, bit for bit. LOCAL; the host does not wait."""
    ids_P = ids_P.contiguous()
    P, device = len(ids_P), ids_P.device
    ranks_P = torch.empty(P, dtype=torch.int32, device=device)
    counts_G = torch.empty(num_groups, dtype=torch.int32, device=device)
    ends = ids_P if limit is None else limit
    if P <= FEW:
        _by_group[(num_groups,)](ids_P, ends, ranks_P, counts_G, P, LIMIT=limit is not None, CHUNK=CHUNK)
        return ranks_P, counts_G
    blocks = triton.cdiv(P, BLOCK)
    block_counts = torch.zeros(blocks, num_groups, dtype=torch.int32, device=device)
    _within_blocks[(blocks,)](
        ids_P, ends, ranks_P, block_counts, P, num_groups, LIMIT=limit is not None, BLOCK=BLOCK, num_warps=8
    )
    _sum_blocks[(triton.cdiv(num_groups, COLUMNS),)](
        block_counts, counts_G, blocks, num_groups, ROWS=64, COLUMNS=COLUMNS
    )
    _add_blocks[(blocks,)](ids_P, ranks_P, block_counts, P, num_groups, BLOCK=BLOCK)
    return ranks_P, counts_G


def aot_cases(target: Target) -> Iterator[AotCase]:
    """The four kernels; nothing in them depends on a model's sizes."""
    ids = {"ids_ptr": "*i64", "limit_ptr": "*i32", "ranks_ptr": "*i32", "counts_ptr": "*i32", "P": "i32"}
    sums = {"block_counts_ptr": "*i32", "counts_ptr": "*i32", "B": "i32", "G": "i32"}
    adds = {"ids_ptr": "*i64", "ranks_ptr": "*i32", "block_counts_ptr": "*i32", "P": "i32", "G": "i32"}
    yield _case(target, "few ids", _by_group, ids, {"LIMIT": True, "CHUNK": CHUNK}, 4)
    yield _case(
        target, "within blocks", _within_blocks, ids | {"G": "i32"}, {"LIMIT": True, "BLOCK": BLOCK}, 8
    )
    yield _case(target, "over blocks", _sum_blocks, sums, {"ROWS": 64, "COLUMNS": COLUMNS}, 4)
    yield _case(target, "add blocks", _add_blocks, adds, {"BLOCK": BLOCK}, 4)


def _case(
    target: Target,
    label: str,
    kernel: object,
    signature: dict[str, str],
    constants: dict[str, int],
    warps: int,
) -> AotCase:
    return AotCase(
        operation="group_ranks",
        label=label,
        kernel=kernel,
        signature=signature,
        constants=constants,
        aligned=frozenset(name for name in signature if name.endswith("_ptr")),
        num_warps=warps,
        representative=kernel is _within_blocks and target.name == "sm_90",
    )
