"""Greedy tokens over shared memory, whatever the dispatch mode, and wherever shared experts live.

A decoder per rank, a thread each, in lock-step: rounds that carry a prompt in parts, ranks that go idle,
one or two micro-batches, redundant experts. Held against one rank without any of it.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_runtime.checkpoint import shapes
from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.overlap import DECODE, PREFILL
from moe_runtime.expert_parallel.buffer import Buffer, Buffers
from moe_runtime.expert_parallel.local import LocalBuffer
from moe_runtime.expert_parallel.masked import MaskedBuffer
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.expert_parallel.shm import ShmBuffer, ShmSizes
from moe_runtime.models.families.registry import read_spec
from moe_runtime.placement.placement import slots_per_rank
from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import serve_shared_in_slots
from tests.expert_parallel.threads import run_threads
from tests.models.decoder_harness import load_decoder
from tests.models.greedy import Course, greedy

torch.set_num_threads(1)

STEPS, ROUND_TOKENS = 8, 12
PROMPTS = {
    0: [[5, 17, 301, 44, 9, 80, 12], [99, 100, 3]],
    1: [[7, 9, 11, 40, 41, 42, 300, 301, 8, 77, 78, 79, 9, 10, 11, 12]],
    2: [],
    3: [[400, 22, 63]],
}
IDLE_AFTER = {0: STEPS, 1: 5, 2: 1, 3: STEPS}
PER_STEP: tuple[DispatchMode, DispatchMode] = ("normal", "low_latency")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose two shared experts are stored as one MLP, as the hub has them."""
    path: Path = tmp_path_factory.mktemp("modes") / "tiny"
    plain = shapes.config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "config", lambda *a: {**plain(*a), "n_shared_experts": 2})
        make_checkpoint(path, family="deepseek_v3", size="tiny")
    return path


@pytest.fixture(scope="module")
def reference(folder) -> dict[int, list[list[int]]]:
    decoder = load_decoder(folder)
    plain = Course(steps=STEPS)
    return {r: greedy(decoder, p, plain, idle_after=IDLE_AFTER[r])[0] for r, p in PROMPTS.items()}


def both_modes(buffer: Buffer, ranks: int) -> Buffers:
    return {"normal": buffer, "low_latency": MaskedBuffer(buffer, capacity=ranks * ROUND_TOKENS)}


def generate(
    folder: Path, ranks: int, course: Course, *, slots: bool, redundant: int
) -> list[list[list[int]]]:
    """Tokens by rank and sequence."""
    spec = read_spec(folder)
    spec = serve_shared_in_slots(spec) if slots else spec
    sizes = ShmSizes(
        num_ranks=ranks,
        slots_per_rank=slots_per_rank(spec.moe.slot_experts, redundant, ranks),
        hidden=spec.hidden,
        top_k=spec.moe.slots_per_token,
        max_tokens=ROUND_TOKENS,
        payload=Payload("float32"),
        output_dtype=torch.float32,
    )
    window = ShmBuffer(sizes, rank=0, timeout=30.0).create_window()

    def work(rank: int) -> list[list[int]]:
        buffer: Buffer = LocalBuffer(slots_per_rank=sizes.slots_per_rank)
        if ranks > 1:
            shared = ShmBuffer(sizes, rank=rank, timeout=30.0)
            shared.connect(window.address)
            buffer = shared
        decoder = load_decoder(
            folder,
            redundant_experts=redundant,
            shared_slots=slots,
            rank=rank,
            num_ranks=ranks,
            buffers=both_modes(buffer, ranks),
        )
        return greedy(decoder, PROMPTS[rank], course, idle_after=IDLE_AFTER[rank])[0]

    try:
        return run_threads([partial(work, r) for r in range(ranks)])
    finally:
        window.close()


@pytest.mark.parametrize("order", [None, PREFILL, DECODE], ids=["plain", "prefill", "decode"])
@pytest.mark.parametrize("modes", [("low_latency", "low_latency"), PER_STEP], ids=["masked", "per_step"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_dispatch_mode_changes_no_token(folder, reference, ranks, modes, order):
    course = Course(
        steps=STEPS, rounds=2, round_tokens=ROUND_TOKENS, order=order, prefill=modes[0], decode=modes[1]
    )
    found = generate(folder, ranks, course, slots=False, redundant=0)
    assert found == [reference[r] for r in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "redundant", "order"),
    [(1, 0, None), (2, 0, DECODE), (2, 4, None), (4, 0, None), (4, 7, PREFILL)],
)
def test_shared_experts_in_slots_change_no_token(folder, reference, ranks, redundant, order):
    course = Course(steps=STEPS, rounds=2, round_tokens=ROUND_TOKENS, order=order)
    grouped = generate(folder, ranks, course, slots=True, redundant=redundant)
    assert grouped == [reference[r] for r in range(ranks)]
    masked = replace(course, prefill="low_latency", decode="low_latency")
    assert generate(folder, ranks, masked, slots=True, redundant=redundant) == grouped
