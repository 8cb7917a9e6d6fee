"""A single prompt cut inside: the second part reads the KV that the first writes in the same step.

And its scores, which are made in slices of rows.
"""

import numpy as np
import pytest
import torch

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine import device_step, split
from moe_runtime.engine.agree import StepDecision, StepKind
from moe_runtime.engine.device_step import NO_SAMPLES, Samples
from moe_runtime.models.context import NoClock
from moe_runtime.models.decoder import Decoder
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import make_sequence
from moe_runtime.scheduler.step import SchedulerLimits
from moe_runtime.scheduler.step_inputs import StepInputs
from moe_runtime.spec.requests import Request, SamplingParams
from tests.models.decoder_harness import load_decoder

BLOCKS, BLOCK_TOKENS, PROMPT = 8, 4, 9
DECISION = StepDecision(kind=StepKind.FORWARD, rounds=1, round_tokens=PROMPT)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    folder = tmp_path_factory.mktemp("cut") / "tiny"
    make_checkpoint(folder, family="deepseek_v3", size="tiny")
    return load_decoder(folder)


def prompt_inputs(seed: int) -> StepInputs:
    """The prefill of one prompt of nine tokens, which samples a token at its end."""
    scheduler = Scheduler(
        SchedulerLimits(
            max_batch_tokens=64,
            max_sequences=2,
            chunk_tokens=64,
            block_tokens=BLOCK_TOKENS,
            num_blocks=BLOCKS,
            max_positions=64,
        )
    )
    prompt = np.random.default_rng(seed).integers(8, 500, PROMPT).tolist()
    sampling = SamplingParams(prompt_logprobs=20)
    scheduler.add(make_sequence(Request(id=0, prompt=prompt, sampling=sampling), ()))
    scheduler.propose()
    return scheduler.build(64, 64).inputs


@torch.inference_mode()
def run(decoder: Decoder, parts: list[StepInputs]) -> tuple[Samples, list[torch.Tensor]]:
    """Samples and cache of a step, whose cache holds NaN where nothing was written."""
    spec = decoder.spec
    shape = (BLOCKS, BLOCK_TOKENS, spec.attention.kv_entry)
    cache = [torch.full(shape, torch.nan) for _ in range(spec.num_layers)]
    pairs = [
        (
            part,
            device_step.make_context(
                part,
                DECISION,
                previous=NO_SAMPLES,
                kv_cache=cache,
                block_tokens=BLOCK_TOKENS,
                clock=NoClock(),
            ),
        )
        for part in parts
    ]
    return device_step.run(decoder, pairs, decode_only=False), cache


@pytest.mark.parametrize("at", range(1, PROMPT))
@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_of_nine_tokens_may_be_cut_anywhere(decoder, at, seed):
    whole = prompt_inputs(seed)
    assert whole.num_tokens == PROMPT
    expected, cache = run(decoder, [whole])
    cut, cut_cache = run(decoder, [split.cut(whole, 0, at), split.cut(whole, at, PROMPT)])
    assert expected.tokens_N.tolist() == cut.tokens_N.tolist()
    assert len(cut.tokens_N) == 1
    assert expected.scores is not None
    assert cut.scores is not None
    assert expected.scores.top_WK.shape == (PROMPT - 1, 20)
    assert (expected.scores.chosen_W - cut.scores.chosen_W).abs().max() < 1e-4
    assert (expected.scores.top_WK - cut.scores.top_WK).abs().max() < 1e-4
    for one, other in zip(cache, cut_cache, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert (one - other).nan_to_num().abs().max() < 1e-5


def test_batch_invariant_scores_are_the_same_bits_however_the_prompt_is_cut(tmp_path):
    make_checkpoint(tmp_path / "tiny", family="deepseek_v3", size="tiny")
    decoder, whole = load_decoder(tmp_path / "tiny", deterministic=True), prompt_inputs(0)
    expected = run(decoder, [whole])[0].scores
    for at in (1, 4, 8):
        found = run(decoder, [split.cut(whole, 0, at), split.cut(whole, at, PROMPT)])[0].scores
        assert expected is not None
        assert found is not None
        assert torch.equal(found.chosen_W, expected.chosen_W)
        assert torch.equal(found.top_WK, expected.top_WK)


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
@torch.inference_mode()
def test_logits_of_a_prompt_are_made_for_a_few_rows_at_a_time(decoder, monkeypatch, rows):
    inputs, made = prompt_inputs(0), []
    x_TH = torch.randn(PROMPT, decoder.spec.hidden, generator=torch.Generator().manual_seed(0))
    expected_TV = decoder.logits(x_TH).log_softmax(-1)

    def logits(rows_NH: torch.Tensor) -> torch.Tensor:
        made.append(len(rows_NH))
        return Decoder.logits(decoder, rows_NH)

    monkeypatch.setattr(decoder, "logits", logits)
    found = device_step.score(decoder, x_TH, inputs, most_bytes=rows * 4 * decoder.spec.vocab_size)
    assert found is not None
    assert max(made) == min(rows, PROMPT - 1)
    assert sum(made) == PROMPT - 1
    chosen_S = expected_TV[:-1].gather(1, torch.from_numpy(inputs.token_ids_T[1:].astype(np.int64))[:, None])
    assert torch.allclose(found.chosen_W, chosen_S[:, 0], atol=1e-5)
    assert torch.allclose(found.top_WK, expected_TV[:-1].topk(20).values, atol=1e-5)
