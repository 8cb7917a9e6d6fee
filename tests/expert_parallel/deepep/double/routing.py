"""What both generations of the normal mode send: each token once to every rank that has one of its experts.

T tokens, K top-k, R ranks, E experts, N received rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """per_rank_R int32, per_expert_E int32, in_rank_TR bool."""

    per_rank_R: Tensor
    per_expert_E: Tensor
    in_rank_TR: Tensor


def layout(topk_idx_TK: Tensor, experts: int, ranks: int) -> Layout:
    T = topk_idx_TK.shape[0]
    owner_TK = torch.where(topk_idx_TK < 0, ranks, topk_idx_TK // (experts // ranks)).long()
    in_rank_TR = torch.zeros(T, ranks + 1, dtype=torch.bool).scatter_(1, owner_TK, True)[:, :ranks]
    per_expert = torch.bincount(topk_idx_TK.flatten().long() + 1, minlength=experts + 1)[1:]
    return Layout(in_rank_TR.sum(0).int(), per_expert.int(), in_rank_TR.contiguous())


@dataclass(frozen=True, slots=True)
class Received:
    """Rows in order (source rank, token); `local_NK` holds ids of this rank's experts, -1 for others.

    weights_NK  0 where local is -1
    token_N     the row's index at its source
    per_source  rows of each rank, in rank order
    """

    x: Tensor
    scales: Tensor | None
    local_NK: Tensor
    weights_NK: Tensor
    token_N: Tensor
    per_source: tuple[int, ...]


def messages(
    x: Tensor, scales: Tensor | None, topk_idx_TK: Tensor, weights_TK: Tensor, how: Layout, *, experts: int
) -> list[list[Tensor]]:
    """Per destination: rows, (scales), local ids, weights, token indices."""
    ranks = how.in_rank_TR.shape[1]
    local = experts // ranks
    result = []
    for rank in range(ranks):
        token_N = how.in_rank_TR[:, rank].nonzero().flatten()
        ids_NK = topk_idx_TK[token_N]
        here_NK = (ids_NK >= 0) & (ids_NK // local == rank)
        parts = [x[token_N]] if scales is None else [x[token_N], scales[token_N]]
        parts += [
            torch.where(here_NK, ids_NK - rank * local, -1).to(topk_idx_TK.dtype),
            torch.where(here_NK, weights_TK[token_N], 0.0),
            token_N.int(),
        ]
        result.append(parts)
    return result


def received(arrived: list[list[Tensor]], *, fp8: bool) -> Received:
    columns = [torch.cat(parts) for parts in zip(*arrived, strict=True)]
    scales = columns.pop(1) if fp8 else None
    x, local_NK, weights_NK, token_N = columns
    return Received(x, scales, local_NK, weights_NK, token_N, tuple(len(m[0]) for m in arrived))
