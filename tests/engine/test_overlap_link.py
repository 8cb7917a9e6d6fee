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

    def run(micro_batches: int) -> tuple[torch.Tensor, float, float]:
        """Hidden states, wall seconds, the share of the computation done beside a transfer."""
        rank = Rank(decoder)
        half = len(prompts) // micro_batches
        parts = [{s: p for s, p in prompts.items() if s // half == i} for i in range(micro_batches)]
        batches = [(decoder.embed(c), c) for c in (rank.context({}, part) for part in parts)]
        link.reset(link.seconds_per_row)
        began, computed = time.perf_counter(), time.thread_time()
        hidden = overlap.run(batches, list(decoder.layers))
        computed = time.thread_time() - computed
        return torch.cat(hidden), time.perf_counter() - began, link.computed_meanwhile / computed

    run(1), run(2)
    # Four transfers of 512 rows: half a second on the link, far more than the computation.
    link.seconds_per_row = 0.5 / (4 * 512)
    plain, plain_seconds, plain_hidden = run(1)
    both, both_seconds, both_hidden = run(2)
    assert (plain - both).abs().max() < 1e-4
    assert min(plain_seconds, both_seconds) > 0.5
    # CPU seconds, not wall seconds: what other processes do on this machine does not count.
    assert plain_hidden < 0.1
    assert both_hidden > 0.4
