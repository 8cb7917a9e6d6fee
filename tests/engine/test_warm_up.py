"""The first pass of a model, before any request: what it answers must be numbers."""

import pytest
import torch

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.device_step import warm_up
from moe_runtime.errors import CheckpointError
from moe_runtime.models.context import NoClock
from tests.models.decoder_harness import Rank, load_decoder


@pytest.mark.parametrize("scale", [1.0, 1e38])
def test_a_model_that_answers_nan_is_refused_before_it_serves(tmp_path, scale):
    make_checkpoint(tmp_path / "c", family="qwen3_moe", size="tiny")
    decoder = load_decoder(tmp_path / "c")
    decoder.norm.weight.mul_(scale).mul_(scale)
    cache = Rank(decoder, blocks=4).cache

    def run() -> None:
        with torch.inference_mode():
            warm_up(decoder, cache, block_tokens=16, num_tokens=8, clock=NoClock())

    if scale == 1.0:
        run()
        return
    with pytest.raises(CheckpointError, match="NaN or infinite: .* overflow in float32"):
        run()
