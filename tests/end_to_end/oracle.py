"""Greedy tokens of transformers' own models, and how far each can be trusted.

A position is unsafe when the margin of its argmax (in logits), or of a choice a router makes at it
(in logits for softmax, in biased scores for sigmoid), is under `MARGIN`: two correct programs may
then differ. A comparison stops at a sequence's first unsafe
position; what is left out is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

MARGIN = 1e-5


@dataclass(frozen=True)
class Reference:
    """`tokens` are greedy; the first `safe` of them are beyond doubt. `logits` [V] of the first token."""

    prompt: list[int]
    tokens: list[int]
    safe: int
    logits: Tensor


@torch.inference_mode()
def reference(checkpoint: Path, prompts: Sequence[list[int]], max_tokens: int) -> list[Reference]:
    """What transformers generates for each prompt, end-of-sequence ignored."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    outputs = _generate(model, prompts, max_tokens)
    margins: list[Tensor] = []
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(lambda m, args, out: margins.append(_router_margins(m, out[0])))
    return [_judge(model, p, tokens, margins) for p, tokens in zip(prompts, outputs, strict=True)]


def _generate(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """All prompts at once, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[list[int]] = out[:, longest:].tolist()
    return tokens


def _judge(model: Any, prompt: list[int], tokens: list[int], margins: list[Tensor]) -> Reference:
    """One pass over prompt and output, without cache or padding: margins, and the same argmax."""
    margins.clear()
    logits_TV = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0].float()
    top = logits_TV.topk(2)
    chosen_T = torch.stack(margins).amin(0) if margins else torch.full_like(top.values[:, 0], float("inf"))
    argmax_T = top.values[:, 0] - top.values[:, 1]
    # Token n is computed from positions 0 .. prompt+n-1; the argmax that counts is the last one's.
    first = len(prompt) - 1
    safe = 0
    while safe < len(tokens):
        last = first + safe
        if chosen_T[: last + 1].min() < MARGIN or argmax_T[last] < MARGIN:
            break
        assert int(top.indices[last, 0]) == tokens[safe], "transformers disagrees with itself"
        safe += 1
    return Reference(prompt, tokens, safe, logits_TV[first])


def _router_margins(router: Any, logits_TE: Tensor) -> Tensor:
    """[T]: the smallest gap between what a router chose and what it left out."""
    if not hasattr(router, "e_score_correction_bias"):
        return _gap(logits_TE.double(), router.top_k)  # softmax keeps the order of the logits
    choice_TE = logits_TE.double().sigmoid() + router.e_score_correction_bias.double()
    grouped = choice_TE.view(len(choice_TE), router.num_group, -1)
    groups_TG = grouped.topk(2, dim=-1).values.sum(-1)
    margin_T = torch.full((len(choice_TE),), float("inf"), dtype=torch.float64)
    if router.topk_group < router.num_group:
        margin_T = _gap(groups_TG, router.topk_group)
    kept = torch.zeros_like(groups_TG, dtype=torch.bool)
    kept.scatter_(1, groups_TG.topk(router.topk_group).indices, True)
    masked = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(choice_TE)
    return torch.minimum(margin_T, _gap(masked, router.top_k))


def _gap(scores: Tensor, kept: int) -> Tensor:
    top = scores.topk(kept + 1, dim=-1).values
    return top[:, kept - 1] - top[:, kept]
