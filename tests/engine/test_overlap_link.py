"""Overlap hides a slow link: a step of two micro-batches is faster than the plain one, and says the same."""

import time

import torch

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine import overlap
from moe_runtime.expert_parallel.local import LocalBuffer
from tests.expert_parallel.slow_link import SlowLink
from tests.models.decoder_harness import Rank, load_decoder


@torch.inference_mode()
def test_a_slow_link_is_hidden_and_nothing_changes(tmp_path):
    make_checkpoint(tmp_path / "tiny", family="deepseek_v3", size="tiny")
    link = SlowLink(LocalBuffer(slots_per_rank=32), 0.0)
    decoder = load_decoder(tmp_path / "tiny", buffers={"normal": link})  # type: ignore[dict-item]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(8, 500, (8, 64), generator=generator).tolist()
    prompts = dict(enumerate(tokens))

    def run(micro_batches: int, seconds_per_row: float) -> tuple[torch.Tensor, float]:
        rank = Rank(decoder)
        half = len(prompts) // micro_batches
        parts = [{s: p for s, p in prompts.items() if s // half == i} for i in range(micro_batches)]
        batches = [(decoder.embed(c), c) for c in (rank.context({}, part) for part in parts)]
        link.seconds_per_row = seconds_per_row
        began = time.perf_counter()
        hidden = overlap.run(batches, list(decoder.layers))
        return torch.cat(hidden), time.perf_counter() - began

    run(1, 0.0), run(2, 0.0)
    # Four transfers of 512 rows: half a second on the link, far more than the computation.
    per_row = 0.5 / (4 * 512)
    ratios = []
    for _ in range(3):
        plain, plain_seconds = run(1, per_row)
        both, both_seconds = run(2, per_row)
        assert (plain - both).abs().max() < 1e-4
        assert plain_seconds > 0.5
        ratios.append((both_seconds - 0.5) / (plain_seconds - 0.5))
    # Of what the plain step pays on top of the link's time, computation, at least a third is hidden.
    assert min(ratios) < 0.67, ratios
