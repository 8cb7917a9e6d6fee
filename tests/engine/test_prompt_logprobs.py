"""Logprobs of prompts are transformers' own, however the prompt is cut into steps and whoever runs it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.messages import PromptLogprobs
from moe_runtime.frontend.live import Live
from moe_runtime.frontend.openai.logprobs import each_of
from moe_runtime.spec.requests import FinishReason, SamplingParams
from tests.end_to_end.oracle import reference
from tests.engine.in_process import InProcess, ranks, running

TOLERANCE = 4e-4  # twice that of a logit: the logprob has the others' in it too
DEPLOYMENTS: dict[str, dict] = {
    "token by token": {"unified": {"scheduler": {"chunk_tokens": 1}}},
    "chunks of 9": {"unified": {"scheduler": {"chunk_tokens": 9, "pipeline_depth": 1}}},
    "chunks of 5, preempted": {
        "unified": {
            "scheduler": {"chunk_tokens": 5, "pipeline_depth": 1},
            "kv_cache": {"blocks": 52, "block_tokens": 1},
        }
    },
    "two ranks, halves and rounds": {
        "unified": {
            "expert_parallel": 2,
            "scheduler": {"chunk_tokens": 40},
            "dispatch": {"max_tokens": 8},
            "overlap": {"micro_batches": 2},
        }
    },
    "prefill and decode": {"prefill": {"scheduler": {"chunk_tokens": 24}}, "decode": {}},
}


@dataclass(frozen=True)
class Known:
    """A prompt, what follows it, and transformers' logprobs [T, V] after each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    logprobs_TV: Tensor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, family="deepseek_v3", size="tiny")
    return folder


@pytest.fixture(scope="module")
def known(checkpoint) -> list[Known]:
    rng = np.random.default_rng(12)
    prompts = [rng.integers(8, 512, n).tolist() for n in (1, 2, 41, 30, 17)]
    prompts.append([*prompts[2][:32], *rng.integers(8, 512, 6).tolist()])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = []
    for one in reference(checkpoint, prompts, 8):
        assert one.safe == 8, "a choice of a router is too close to call: take another prompt"
        with torch.inference_mode():
            logits_TV = model(torch.tensor([one.prompt]), use_cache=False).logits[0].float()
        found.append(Known(one.prompt, one.tokens, logits_TV.log_softmax(-1)))
    return found


def check(found: PromptLogprobs | None, one: Known, count: int) -> None:
    """The logprobs of all tokens but the first, and of the best ones at each place."""
    assert found is not None
    listed = each_of(found)
    assert len(listed) == len(one.prompt) - 1
    for p, logprobs_V, token in zip(listed, one.logprobs_TV, one.prompt[1:], strict=False):
        assert p.chosen == pytest.approx(float(logprobs_V[token]), abs=TOLERANCE)
        assert len(p.top_ids) == len(set(p.top_ids)) == count
        assert p.top == pytest.approx(logprobs_V[p.top_ids].tolist(), abs=TOLERANCE)
        assert p.top == pytest.approx(logprobs_V.topk(count).values.tolist(), abs=TOLERANCE)
        assert p.chosen in p.top or token not in p.top_ids


async def served(launch: InProcess, known: Sequence[Known], max_tokens: int, count: int) -> list[Live]:
    """All prompts at once; penalties and the temperature are no business of a prompt's."""
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        prompt_logprobs=count,
        temperature=0.0 if max_tokens else 1.5,
        repetition_penalty=1.0 if max_tokens else 2.0,
        logit_bias={} if max_tokens else {9: 50.0},
    )
    lives = [launch.fleet.submit(one.prompt, params) for one in known]
    await asyncio.gather(*(live.done.wait() for live in lives))
    return lives


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_prompts_are_scored_once_and_as_by_transformers(tmp_path, checkpoint, known, name):
    """Cold and warm; with no token and some to follow."""
    rounds = ((0, 2), (8, 20))
    if name == "token by token":
        known, rounds = known[:3], ((0, 2), (1, 0))

    async def work() -> None:
        async with running(engines, bootstrap) as launch:
            for max_tokens, count in rounds:
                for live, one in zip(await served(launch, known, max_tokens, count), known, strict=True):
                    assert (live.finish_reason, live.error) == (FinishReason.LENGTH, None)
                    assert live.token_ids == one.tokens[:max_tokens]
                    assert live.cached_tokens == 0, "a row that was found would have had no logits"
                    check(live.prompt_logprobs, one, count)
                if not max_tokens and "decode" in engines:
                    assert engines["decode"].scheduler.step == 0
            plain = launch.submit(known[2].prompt, 1)
            await plain.done.wait()
            assert plain.prompt_logprobs is None
            block = engines[next(iter(engines))].scheduler.limits.block_tokens
            if "preempted" not in name:  # they may be evicted there
                assert plain.cached_tokens == 40 // block * block
            await launch.until(launch.at_baseline, 5, "everything back")
            totals = [e.desk.tally.totals() for e in engines.values()]
            assert any(t.preemptions for t in totals) == ("preempted" in name)
            assert sum(t.output_tokens for t in totals) == len(known) * rounds[-1][0] + 1

    with ranks(tmp_path, checkpoint, DEPLOYMENTS[name]) as (engines, bootstrap):
        asyncio.run(work())
