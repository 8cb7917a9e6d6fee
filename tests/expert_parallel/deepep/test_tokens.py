"""Greedy tokens of a decoder whose ranks exchange rows through the DeepEP adapters, bf16.

Held against the same decoder on one rank (`local`). Low-latency mode sums in fp32 in top-k order and
rounds once, as `local` does, so its tokens are compared to the end; the other modes round on the way, and
a comparison stops where the two best logits of the reference are closer than `MARGIN`.
"""

import pytest
import torch

from moe_runtime.checkpoint import shapes
from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.overlap import DECODE, PREFILL
from moe_runtime.expert_parallel.deepep.elastic import ElasticRowsBuffer
from moe_runtime.expert_parallel.deepep.modes import open_buffers
from moe_runtime.expert_parallel.deepep.shape import Shape
from moe_runtime.models.families import registry
from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import serve_shared_in_slots
from tests.expert_parallel.deepep.deepep_ranks import run_ranks
from tests.expert_parallel.deepep.double.library import double_library
from tests.models.decoder_harness import load_decoder
from tests.models.greedy import Course, greedy

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


def open_mode(mode, shape, group):
    if mode == "elastic":
        return {"normal": ElasticRowsBuffer(double_library(), shape, group=group)}
    return open_buffers(double_library(), shape, group=group, modes=(mode,))


@pytest.mark.parametrize(
    ("mode", "hidden", "order", "redundant", "shared_slots"),
    [
        ("normal", 256, None, 4, False),
        ("normal", 256, PREFILL, 3, True),
        ("low_latency", 2048, None, 0, False),
        ("low_latency", 2048, DECODE, 1, True),
        ("elastic", 256, DECODE, 3, True),
    ],
)
def test_greedy_tokens_are_those_of_one_rank(
    mode, hidden, order, redundant, shared_slots, tmp_path, monkeypatch
):
    """Also as two micro-batches, whose transfers share DeepEP's buffers, and with shared experts in slots."""
    folder = tmp_path / "checkpoint"
    checkpoint(folder, hidden, monkeypatch)
    spec = registry.read_spec(folder, "bfloat16")
    spec = serve_shared_in_slots(spec) if shared_slots else spec
    shape = Shape(
        ranks=2,
        slots_per_rank=(spec.moe.slot_experts + redundant) // 2,
        hidden=hidden,
        top_k=spec.moe.slots_per_token,
        max_tokens=ROUND_TOKENS,
    )
    dispatch: DispatchMode = "low_latency" if mode == "low_latency" else "normal"
    course = Course(
        steps=STEPS,
        rounds=ROUNDS,
        round_tokens=ROUND_TOKENS,
        order=order,
        prefill=dispatch,
        decode=dispatch,
    )

    def work(group):
        decoder = load_decoder(
            folder,
            dtype="bfloat16",
            redundant_experts=redundant,
            shared_slots=shared_slots,
            rank=group.rank(),
            num_ranks=2,
            buffers=open_mode(mode, shape, group),
        )
        return greedy(decoder, PROMPTS[group.rank()], course, idle_after=IDLE_AFTER[group.rank()])

    outcomes = run_ranks(2, work)
    reference = load_decoder(folder, dtype="bfloat16", shared_slots=shared_slots)
    compared = 0
    for rank, (tokens, _) in enumerate(outcomes):
        wanted, margins = greedy(reference, PROMPTS[rank], Course(steps=STEPS), idle_after=IDLE_AFTER[rank])
        for got, want, margin in zip(tokens, wanted, margins, strict=True):
            sure = next((i for i, m in enumerate(margin) if m < MARGIN[mode]), len(margin))
            assert got[:sure] == want[:sure]
            compared += sure
    total = sum(len(p) * IDLE_AFTER[r] for r, p in PROMPTS.items())
    enough = total if mode == "low_latency" else total // 3
    assert compared >= enough, f"only {compared} of {total} positions are clear enough to compare"
