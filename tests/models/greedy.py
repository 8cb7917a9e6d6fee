"""Greedy generation by one rank of an expert-parallel group, without an engine: prefill, then decode."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.engine import overlap
from moe_runtime.models.decoder import Decoder
from moe_runtime.spec.limits import DispatchMode
from tests.models.decoder_harness import Rank


@dataclass(frozen=True, kw_only=True)
class Course:
    """How the steps run, the same on every rank.

    steps         in all; `rounds` of `round_tokens` rows each
    order         of two micro-batches (the first sequence, and all others); None: one
    prefill       dispatch mode of the first step
    decode        and of those after it
    """

    steps: int
    rounds: int = 1
    round_tokens: int = 0
    order: overlap.Order | None = None
    prefill: DispatchMode = "normal"
    decode: DispatchMode = "normal"


def greedy(
    decoder: Decoder, prompts: Sequence[list[int]], course: Course, *, idle_after: int
) -> tuple[list[list[int]], list[list[float]]]:
    """(tokens, margins) per sequence; steps after `idle_after` take part with zero tokens."""
    rank = Rank(decoder, rounds=course.rounds, round_tokens=course.round_tokens, mode=course.prefill)
    tokens: list[list[int]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    logits = _step(rank, course, prefill=dict(enumerate(prompts)))
    rank.mode = course.decode
    logits = logits[torch.tensor([len(p) for p in prompts]).cumsum(0) - 1] if prompts else logits
    for step in range(1, course.steps + 1):
        best = logits.topk(2).values
        for i, row in enumerate(logits):
            tokens[i].append(int(row.argmax()))
            margins[i].append(float(best[i, 0] - best[i, 1]))
        if step == course.steps:
            break
        if step >= idle_after:
            assert _step(rank, course).shape[0] == 0
            logits = logits[:0]
        else:
            logits = _step(rank, course, decode={i: t[-1] for i, t in enumerate(tokens)})
    return tokens, margins


def _step(
    rank: Rank,
    course: Course,
    *,
    decode: dict[int, int] | None = None,
    prefill: dict[int, list[int]] | None = None,
) -> Tensor:
    """Logits of all rows."""
    decode, prefill = decode or {}, prefill or {}
    if course.order is None:
        return rank.step(decode, prefill)
    halves = [
        rank.context(
            {i: t for i, t in decode.items() if (i == 0) == first},
            {i: t for i, t in prefill.items() if (i == 0) == first},
        )
        for first in (True, False)
    ]
    decoder = rank.decoder
    with torch.inference_mode():
        done = overlap.run([(decoder.embed(h), h) for h in halves], list(decoder.layers), order=course.order)
        return torch.cat([decoder.logits(x_TH) for x_TH in done])
