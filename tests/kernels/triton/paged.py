"""Paged caches for tests of attention, poisoned wherever no token lies, and dense attention in float64.

S tokens per block, E values per entry, C tokens of a sequence, A heads, n rows, Q and V values per head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.kv_write.reference import kv_write
from moe_runtime.kernels.paged import latent
from tests.kernels.triton.cases import generator, normal

BLOCKS = (16, 64)


@dataclass(frozen=True)
class Paged:
    """`entries` are what the cache holds, in float64, quantised if the cache is packed."""

    cache_BSE: Tensor
    tables_DB: Tensor
    lengths: tuple[int, ...]
    entries: tuple[Tensor, ...]

    def plan(self, module: Any, rows: Sequence[int] | None = None) -> Any:
        """The decode plan of all or some sequences."""
        chosen = list(range(len(self.lengths)) if rows is None else rows)
        lengths = torch.tensor([self.lengths[i] for i in chosen])
        return module.plan_decode(
            self.tables_DB[chosen],
            lengths,
            max_context=max(lengths.tolist(), default=0),
            block_tokens=self.cache_BSE.shape[1],
        )


def paged(
    lengths: Sequence[int], width: int, block_tokens: int, dtype: torch.dtype, *, packed_rank: int = 0
) -> Paged:
    """Sequences in scattered blocks. Unused places are NaN; tables end in a block of nobody, all NaN."""
    S = block_tokens
    used = [-(-length // S) for length in lengths]
    nobody = sum(used)
    order = torch.randperm(nobody, generator=generator(1)).tolist()
    if packed_rank:
        # 0xFF is a NaN in e4m3, fp32 and bf16.
        row_bytes = latent.row_bytes(packed_rank, width - packed_rank)
        cache_BSE = torch.full((nobody + 1, S, row_bytes), 255, dtype=torch.uint8)
    else:
        cache_BSE = torch.full((nobody + 1, S, width), torch.nan, dtype=dtype)
    tables_DB = torch.full((len(lengths), max([1, *used])), nobody)
    entries = []
    for i, length in enumerate(lengths):
        tables_DB[i, : used[i]] = torch.tensor([order.pop() for _ in range(used[i])], dtype=torch.int64)
        at = torch.arange(length)
        slots = tables_DB[i][at // S] * S + at % S
        kv_write(cache_BSE, slots, normal(length, width, seed=10 + i, dtype=dtype))
        rows = cache_BSE.flatten(0, 1)[slots]
        entries.append(latent.unpack(rows, packed_rank).double() if packed_rank else rows.double())
    return Paged(cache_BSE, tables_DB, tuple(lengths), tuple(entries))


def dense(
    q_nAQ: Tensor,
    k_CAQ: Tensor,
    v_CAV: Tensor,
    scale: float,
    *,
    context: int,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> Tensor:
    """float64 [n, A, V]: row i sees tokens up to context + i, or the last `window` of them."""
    scores_nAC = torch.einsum("naq,caq->nac", q_nAQ.double(), k_CAQ) * scale
    behind_nC = context + torch.arange(len(q_nAQ))[:, None] - torch.arange(len(k_CAQ))
    hidden_nC = (behind_nC < 0) | ((behind_nC >= window) if window else False)
    weights_nAC = scores_nAC.masked_fill(hidden_nC[:, None], -torch.inf).exp()
    total_nA1 = weights_nAC.sum(-1, keepdim=True)
    if sinks_A is not None:
        total_nA1 = total_nA1 + sinks_A.double().exp()[:, None]
    return torch.einsum("nac,cav->nav", weights_nAC / total_nA1.clamp_min(1e-300), v_CAV)


def expanded(entries_CE: Tensor, kv_b: Tensor, nope: int, heads: int) -> tuple[Tensor, Tensor]:
    """Keys [C, A, Q] and values [C, A, V] of latent entries, float64 throughout."""
    rows, rank = kv_b.shape
    kv = (entries_CE[:, :rank] @ kv_b.double().T).view(len(entries_CE), heads, rows // heads)
    rope = entries_CE[:, None, rank:].expand(-1, heads, -1)
    return torch.cat((kv[..., :nope], rope), -1), kv[..., nope:]


def grouped(entries_CE: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values [C, A, d] of grouped-query entries, repeated for the query heads."""
    C, E = entries_CE.shape
    k, v = entries_CE.view(C, 2, E // (2 * head_dim), head_dim).unbind(1)
    group = heads // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
