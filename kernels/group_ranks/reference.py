"""group_ranks: every id's place among its equals, and how many there are: the first half of a counting sort.

P ids, G groups. Integers only, so every implementation gives the same.
"""

import torch
from torch import Tensor


def group_ranks(ids_P: Tensor, num_groups: int, *, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """ranks int32 [P] and counts int32 [G]: ranks[p] is the number of q < p with ids[q] = ids[p].

    Ids are int64 in -1 .. num_groups - 1; -1 is in no group and gets rank -1. With `limit` (int32 [1],
    on the device) ids from that place on count as -1.
    """
    if limit is not None:
        ids_P = torch.where(torch.arange(len(ids_P), device=ids_P.device) < limit, ids_P, -1)
    same_GP = ids_P == torch.arange(num_groups, device=ids_P.device)[:, None]
    counts_G = same_GP.sum(1, dtype=torch.int32)
    upto_GP = same_GP.cumsum(1)
    ranks_P = (upto_GP * same_GP).sum(0) - 1
    return ranks_P.to(torch.int32), counts_G
