"""route on a CPU: numpy for few tokens, as its calls cost less, else torch's top-k.

Scores are torch's either way; the rest compares, copies, and adds in a given order, so the result
does not depend on the way taken.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.kernels.route import reference
from moe_runtime.kernels.route.reference import Scoring

FEW_TOKENS = 64


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    *,
    top_k: int,
    scoring: Scoring,
    num_groups: int,
    kept_groups: int,
    masked_group_score: float,
    normalize: bool,
    epsilon: float,
    scale: float,
    chosen_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference, bit for bit."""
    scores_TE = reference.score(logits_TE, scoring)
    groups = (num_groups, kept_groups, reference.best_of_group(scoring), masked_group_score)
    if chosen_TK is None and len(scores_TE) > FEW_TOKENS:
        chosen_TK = _choose_many(scores_TE if bias_E is None else scores_TE + bias_E, top_k, *groups)
    if chosen_TK is not None:
        weights_TK = reference.weigh(scores_TE.gather(1, chosen_TK), scoring, normalize, epsilon, scale)
        return chosen_TK, weights_TK
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    ids_TK = _choose_few(choice_TE.numpy(), top_k, *groups)
    kept_TK = scores_TE.numpy()[np.arange(len(ids_TK))[:, None], ids_TK]
    if scoring == "softmax_selected":
        kept = torch.from_numpy(kept_TK)
        return torch.from_numpy(ids_TK), reference.weigh(kept, scoring, normalize, epsilon, scale)
    if normalize:  # numpy's sum adds eight or more numbers in another order
        total_T = kept_TK[:, 0].copy()
        for k in range(1, top_k):
            total_T += kept_TK[:, k]
        kept_TK /= (total_T + np.float32(epsilon))[:, None]
    kept_TK *= np.float32(scale)
    return torch.from_numpy(ids_TK), torch.from_numpy(kept_TK)


def _choose_few(
    choice_TE: NDArray[np.float32], top_k: int, num_groups: int, kept: int, group_best: int, masked: float
) -> NDArray[np.int64]:
    if num_groups > 1:
        T, E = choice_TE.shape
        choice_TGe = choice_TE.reshape(T, num_groups, E // num_groups).copy()
        if group_best == 2:
            best_TG2 = np.partition(choice_TGe, E // num_groups - 2, axis=-1)[..., -2:]
            group_scores_TG = best_TG2[..., 0] + best_TG2[..., 1]
        else:
            group_scores_TG = choice_TGe.max(-1)
        dropped = np.argsort(-group_scores_TG, axis=-1, kind="stable")[:, kept:]
        choice_TGe[np.arange(T)[:, None], dropped] = masked
        choice_TE = choice_TGe.reshape(T, E)
    ids_TK: NDArray[np.int64] = np.argsort(-choice_TE, axis=-1, kind="stable")[:, :top_k]
    return np.ascontiguousarray(ids_TK)


def _choose_many(
    choice_TE: Tensor, top_k: int, num_groups: int, kept: int, group_best: int, masked: float
) -> Tensor:
    if num_groups > 1:
        T, E = choice_TE.shape
        choice_TGe = choice_TE.view(T, num_groups, E // num_groups)
        group_scores_TG = choice_TGe.topk(group_best, dim=-1).values.sum(-1)
        dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool)
        dropped_TG.scatter_(1, _best(group_scores_TG, kept), False)
        choice_TE = choice_TGe.masked_fill(dropped_TG.unsqueeze(-1), masked).view(T, E)
    return _best(choice_TE, top_k)


def _best(scores_TE: Tensor, count: int) -> Tensor:
    """Top-k by selection, which leaves the order of equal scores open: sorted in full where they matter."""
    if count >= scores_TE.shape[1]:
        return reference.best(scores_TE, count)
    values, ids = scores_TE.topk(count + 1, dim=-1)
    if (values[:, 1:] == values[:, :-1]).any():
        return reference.best(scores_TE, count)
    return ids[:, :count].contiguous()
