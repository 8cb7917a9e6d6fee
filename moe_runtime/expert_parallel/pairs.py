"""(token, slot) pairs of a dispatch: sorted by slot on the way out, summed in top-k order on the
way back. Shared by every backend whose combine order is `topk_fp32`.

T tokens, K top-k, P pairs that go somewhere, S slots of all ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs in order (slot, token, k).

    token_P      int64, the token of each pair
    row_TK       int64, the pair's place in that order; P where slot_ids was -1
    weights_TK   fp32, 0 where slot_ids was -1
    counts_S     int64, pairs per slot
    """

    token_P: Tensor
    row_TK: Tensor
    weights_TK: Tensor
    counts_S: Tensor


def sort_pairs(slot_ids_TK: Tensor, weights_TK: Tensor, num_slots: int) -> Pairs:
    """Order the pairs of a dispatch by slot; stable, so rows of a slot stay in token order."""
    T, K = slot_ids_TK.shape
    flat = slot_ids_TK.reshape(-1)
    # -1 sorts to the end and is cut off.
    order = torch.argsort(torch.where(flat < 0, num_slots, flat), stable=True)
    counts = torch.bincount(flat + 1, minlength=num_slots + 1)
    num_pairs = T * K - int(counts[0])
    row = torch.empty_like(order)
    row[order] = torch.arange(T * K, device=order.device)
    return Pairs(
        token_P=order[:num_pairs] // K,
        row_TK=row.view(T, K).clamp_(max=num_pairs),
        weights_TK=weights_TK.masked_fill(slot_ids_TK < 0, 0.0),
        counts_S=counts[1:],
    )


def weighted_sum(y_PH: Tensor, pairs: Pairs) -> Tensor:
    """[T, H] in the dtype of y: sum over k of weight * y in the order k = 0..K-1, in fp32."""
    T, K = pairs.row_TK.shape
    if len(y_PH) == 0:
        return y_PH.new_zeros(T, y_PH.shape[1])
    rows_TK = pairs.row_TK.clamp(max=len(y_PH) - 1)  # dropped pairs have weight 0
    out_TH = y_PH[rows_TK[:, 0]].float() * pairs.weights_TK[:, :1]
    for k in range(1, K):
        out_TH.addcmul_(y_PH[rows_TK[:, k]].float(), pairs.weights_TK[:, k : k + 1])
    return out_TH.to(y_PH.dtype)
