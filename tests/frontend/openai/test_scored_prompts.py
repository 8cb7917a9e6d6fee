"""Answers with the logprobs of prompts: how much memory they take while they are written."""

import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np

from moe_runtime.engine.messages import PromptLogprobs
from moe_runtime.frontend.openai.choices import News
from moe_runtime.frontend.openai.forms import CompletionForm, Echo, Header
from moe_runtime.frontend.openai.logprobs import LogprobFormat
from tests.frontend.server.stub import read_model, write_checkpoint

TOKENS, BEST = 150, 20


def scored(index: int, vocab_size: int) -> tuple[Any, News]:
    rng = np.random.default_rng(index)
    chosen = -rng.random(TOKENS - 1, dtype=np.float32)
    ids = rng.integers(3, vocab_size, (TOKENS - 1, BEST), dtype=np.int32)
    best = -rng.random((TOKENS - 1, BEST), dtype=np.float32)
    prompt = PromptLogprobs(BEST, chosen.tobytes(), ids.tobytes(), best.tobytes())
    request = SimpleNamespace(prompt=rng.integers(3, vocab_size, TOKENS).tolist())
    live = SimpleNamespace(prompt_logprobs=prompt, request=request, cached_tokens=0)
    return SimpleNamespace(index=index, live=live, num_tokens=0), News("", 0, 0, "length")


def test_only_one_prompt_of_an_answer_is_listed_at_a_time(tmp_path):
    """The lists take some six times the room of the answer that is made of them."""
    vocabulary = read_model(write_checkpoint(tmp_path)).vocabulary
    peaks = []
    for count in (1, 8):
        outputs = [scored(i, vocabulary.size) for i in range(count)]
        echo = [Echo(text="t" * TOKENS)] * count
        form = CompletionForm(Header(id="id", model="m"), LogprobFormat(vocabulary), copies=1, echo=echo)
        tracemalloc.start()
        body = form.body(outputs)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        choices = json.loads(body)["choices"]
        assert [len(c["logprobs"]["top_logprobs"]) for c in choices] == [TOKENS] * count
    # What is written already, once in pieces and once joined, and the lists of one.
    assert peaks[1] < peaks[0] + 2.5 * len(body)
