"""Greedy tokens of a decoder whose ranks exchange rows through the DeepEP adapters, bf16.

Held against the same decoder on one rank (`local`). Low-latency mode sums in fp32 in top-k order and
rounds once, as `local` does, so its tokens are compared to the end; the other modes round on the way, and
a comparison stops where the two best logits of the reference are closer than `MARGIN`.
"""

from functools import partial

import pytest
import torch

from moe_runtime.checkpoint import shapes
from moe_runtime.checkpoint.load import load_rank
from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.engine.overlap import DECODE_OFFSET, PREFILL_OFFSET, run
from moe_runtime.expert_parallel.deepep.shape import Shape
from moe_runtime.expert_parallel.slot_table import SlotTable
from moe_runtime.models.decoder import build_decoder
from moe_runtime.models.families import registry
from moe_runtime.placement.placement import linear
from tests.expert_parallel.deepep.deepep_ranks import build, run_ranks
from tests.models.decoder_harness import CPU, Rank, load_decoder

torch.set_num_threads(1)

STEPS, ROUND_TOKENS, ROUNDS = 12, 12, 2
MARGIN = {"low_latency": 0.0, "normal": 0.2, "elastic": 0.2}
# one rank with two sequences, one with a short one, which is idle for the last steps
PROMPTS = {0: [[5, 17, 301, 44, 9, 80, 12], [99, 100, 3]], 1: [[7] * 13]}
IDLE_AFTER = {0: STEPS, 1: 7}


def checkpoint(folder, hidden, monkeypatch):
    plain = shapes.config
    monkeypatch.setattr(shapes, "config", lambda *a: {**plain(*a), "hidden_size": hidden})
    make_checkpoint(folder, family="deepseek_v3", size="tiny", dtype="bfloat16")


def expert_parallel_decoder(folder, buffer, rank, ranks, redundant):
    """One rank's decoder: its own slots' experts only."""
    with Checkpoint.open(folder) as checkpoint:
        spec = registry.read_spec(folder, "bfloat16")
        placement = linear(
            num_layers=spec.num_moe_layers,
            num_experts=spec.moe.num_experts,
            num_ranks=ranks,
            redundant_experts=redundant,
        )
        table = SlotTable(placement, source_rank=rank, device=CPU)
        decoder = build_decoder(
            spec,
            slots_per_rank=placement.slots_per_rank,
            buffer=buffer,
            slot_tables=[table.layer(i) for i in range(spec.num_moe_layers)],
            dtype=torch.bfloat16,
            device=CPU,
        )
        load_rank(
            checkpoint,
            registry.tensor_targets(spec),
            decoder.tensors(),
            lambda layer: placement.local_experts(layer, rank),
        )
    decoder.prepare()
    return decoder


def overlapped(rank, offset, *, decode=None, prefill=None):
    """Logits of a step as two micro-batches: the first sequence, and all others."""
    decode, prefill = decode or {}, prefill or {}
    halves = [
        rank.context(
            {i: t for i, t in decode.items() if (i == 0) == first},
            {i: t for i, t in prefill.items() if (i == 0) == first},
        )
        for first in (True, False)
    ]
    decoder = rank.decoder
    with torch.inference_mode():
        done = run([(decoder.embed(h), h) for h in halves], list(decoder.layers), offset=offset)
        return torch.cat([decoder.logits(x_TH) for x_TH in done])


def generate(decoder, prompts, steps, idle_after, *, offset=None):
    """(tokens, margins) per sequence; steps after `idle_after` take part with zero tokens.

    With an `offset` every step runs as two micro-batches.
    """
    rank = Rank(decoder, rounds=ROUNDS, round_tokens=ROUND_TOKENS)
    step_of = rank.step if offset is None else partial(overlapped, rank, offset)
    tokens: list[list[int]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    logits = step_of(prefill=dict(enumerate(prompts)))
    ends = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    logits = logits[ends]
    for step in range(1, steps + 1):
        best = logits.topk(2).values
        for i, row in enumerate(logits):
            tokens[i].append(int(row.argmax()))
            margins[i].append(float(best[i, 0] - best[i, 1]))
        if step == steps:
            break
        if step >= idle_after:
            assert step_of().shape[0] == 0
            logits = logits[:0]
        else:
            logits = step_of(decode={i: t[-1] for i, t in enumerate(tokens)})
    return tokens, margins


@pytest.mark.parametrize(
    ("mode", "hidden", "offset", "redundant"),
    [
        ("normal", 256, None, 4),
        ("normal", 256, PREFILL_OFFSET, 0),
        ("low_latency", 2048, None, 0),
        ("low_latency", 2048, DECODE_OFFSET, 0),
        ("elastic", 256, DECODE_OFFSET, 4),
    ],
)
def test_greedy_tokens_are_those_of_one_rank(mode, hidden, offset, redundant, tmp_path, monkeypatch):
    """Also as two micro-batches, whose transfers share DeepEP's two buffers."""
    folder = tmp_path / "checkpoint"
    checkpoint(folder, hidden, monkeypatch)
    spec = registry.read_spec(folder, "bfloat16")
    shape = Shape(
        ranks=2,
        slots_per_rank=(spec.moe.num_experts + redundant) // 2,
        hidden=hidden,
        top_k=spec.moe.router.top_k,
        max_tokens=ROUND_TOKENS,
    )

    def work(group):
        rank = group.rank()
        buffer = build(mode, shape, group)
        decoder = expert_parallel_decoder(folder, buffer, rank, 2, redundant)
        return generate(decoder, PROMPTS[rank], STEPS, IDLE_AFTER[rank], offset=offset)

    outcomes = run_ranks(2, work)
    reference = load_decoder(folder, dtype="bfloat16")
    compared = 0
    for rank, (tokens, _) in enumerate(outcomes):
        wanted, margins = generate(reference, PROMPTS[rank], STEPS, IDLE_AFTER[rank])
        for got, want, margin in zip(tokens, wanted, margins, strict=True):
            sure = next((i for i, m in enumerate(margin) if m < MARGIN[mode]), len(margin))
            assert got[:sure] == want[:sure]
            compared += sure
    total = sum(len(p) * IDLE_AFTER[r] for r, p in PROMPTS.items())
    enough = total if mode == "low_latency" else total // 3
    assert compared >= enough, f"only {compared} of {total} positions are clear enough to compare"
