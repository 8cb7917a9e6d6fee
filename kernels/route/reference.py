"""route: from router logits to experts and weights.

T tokens, E experts, K top-k, G groups. Sources: DeepSeek-V3's gate (sigmoid, bias, groups), DeepSeek-V4's
(sqrt_softplus, layers that look experts up by token), and transformers' modeling_deepseek_v3,
modeling_qwen3_moe and modeling_gpt_oss (softmax over the selected).
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_selected"]


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
    """expert_ids int64 [T, K], best first, and weights fp32 [T, K].

    The choice is made by score + bias, with experts outside the `kept_groups` best groups set to
    `masked_group_score`; weights are the scores without bias, divided by their sum (in the order
    k = 0 .. K-1) + epsilon if `normalize`, times `scale`. Among equal scores the lower expert (or
    group) id wins. With `softmax_selected` the logits choose, and the softmax of the chosen ones
    are the weights. `chosen` int64 [T, K]: the experts are given (layers that look them up by token).
    """
    scores_TE = score(logits_TE, scoring)
    expert_ids_TK = chosen_TK
    if expert_ids_TK is None:
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if num_groups > 1:
            group_best = best_of_group(scoring)
            choice_TE = mask_groups(choice_TE, num_groups, kept_groups, group_best, masked_group_score)
        expert_ids_TK = best(choice_TE, top_k)
    return expert_ids_TK, weigh(scores_TE.gather(1, expert_ids_TK), scoring, normalize, epsilon, scale)


def score(logits_TE: Tensor, scoring: Scoring) -> Tensor:
    """fp32 [T, E]: what experts are chosen by, before the bias."""
    logits_TE = logits_TE.float()
    if scoring == "sigmoid":
        return logits_TE.sigmoid()
    if scoring == "softmax":
        return logits_TE.softmax(-1)
    return functional.softplus(logits_TE).sqrt() if scoring == "sqrt_softplus" else logits_TE


def best_of_group(scoring: Scoring) -> int:
    """How many of a group's best choices make its score: two where a bias corrects them, else one."""
    return 2 if scoring in ("sigmoid", "sqrt_softplus") else 1


def weigh(scores_TK: Tensor, scoring: Scoring, normalize: bool, epsilon: float, scale: float) -> Tensor:
    """Weights fp32 [T, K] from the scores of the chosen experts; sums in the order of k."""
    weights_TK = scores_TK
    if scoring == "softmax_selected":
        weights_TK = (scores_TK - scores_TK.amax(-1, keepdim=True)).exp()
        weights_TK = weights_TK / sum_in_order(weights_TK)
    if normalize:
        weights_TK = weights_TK / (sum_in_order(weights_TK) + epsilon)
    return weights_TK * scale


def sum_in_order(weights_TK: Tensor) -> Tensor:
    """[T, 1]: the columns added one after the other, so that every implementation rounds alike."""
    total_T1 = weights_TK[:, :1]
    for k in range(1, weights_TK.shape[1]):
        total_T1 = total_T1 + weights_TK[:, k : k + 1]
    return total_T1


def mask_groups(
    choice_TE: Tensor, num_groups: int, kept: int, group_best: int, masked_score: float
) -> Tensor:
    """Scores with all but the `kept` best groups masked; a group's score is its `group_best` best summed."""
    T, E = choice_TE.shape
    choice_TGe = choice_TE.view(T, num_groups, E // num_groups)
    group_scores_TG = choice_TGe.topk(group_best, dim=-1).values.sum(-1)
    dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool)
    dropped_TG.scatter_(1, best(group_scores_TG, kept), False)
    return choice_TGe.masked_fill(dropped_TG.unsqueeze(-1), masked_score).view_as(choice_TE)


def best(scores_TE: Tensor, count: int) -> Tensor:
    """Ids of the `count` best per row, best first, ties to the lower id."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()
