"""route on a CPU: top-k by selection, which leaves the order of equal scores open; a full stable
sort only where scores that matter are equal."""

import torch
from torch import Tensor

from moe_runtime.kernels.route import reference
from moe_runtime.kernels.route.reference import Scoring


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
) -> tuple[Tensor, Tensor]:
    """As the reference, bit for bit."""
    logits_TE = logits_TE.float()
    scores_TE = logits_TE.sigmoid() if scoring == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if num_groups > 1:
        T, E = choice_TE.shape
        choice_TGe = choice_TE.view(T, num_groups, E // num_groups)
        if scoring == "sigmoid":
            group_scores_TG = choice_TGe.topk(2, dim=-1).values.sum(-1)
        else:
            group_scores_TG = choice_TGe.amax(-1)
        dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool)
        dropped_TG.scatter_(1, _best(group_scores_TG, kept_groups), False)
        choice_TE = choice_TGe.masked_fill(dropped_TG.unsqueeze(-1), masked_group_score).view(T, E)
    expert_ids_TK = _best(choice_TE, top_k)
    weights_TK = scores_TE.gather(1, expert_ids_TK)
    if normalize:
        weights_TK /= weights_TK.sum(-1, keepdim=True).add_(epsilon)
    return expert_ids_TK, weights_TK.mul_(scale)


def _best(scores_TE: Tensor, count: int) -> Tensor:
    if count >= scores_TE.shape[1]:
        return reference.best(scores_TE, count)
    values, ids = scores_TE.topk(count + 1, dim=-1)
    if (values[:, 1:] == values[:, :-1]).any():
        return reference.best(scores_TE, count)
    return ids[:, :count].contiguous()
