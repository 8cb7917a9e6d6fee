"""Prompt files of `generate`, and the files it writes."""

import json

import numpy as np
import pytest

from moe_runtime.errors import InputError
from moe_runtime.files import require_writable
from moe_runtime.frontend.prompts import prompt_ids, read_prompts
from moe_runtime.frontend.results import GenerateResult, write_logits, write_results
from moe_runtime.spec.requests import SamplingParams


@pytest.fixture
def prompts(tmp_path):
    """Writes objects (or raw lines) as a prompt file; returns its path."""

    def write(*lines):
        path = tmp_path / "in.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return write


def codes(text):
    return [ord(c) for c in text]


def test_defaults_and_all_fields(prompts):
    path = prompts(
        {"prompt": "hé"},
        {"prompt_token_ids": [3, 4], "max_tokens": 2, "temperature": 1, "seed": 9, "ignore_eos": True},
    )
    text, ids = read_prompts(path)
    assert (text.prompt, text.prompt_token_ids, text.sampling) == ("hé", None, SamplingParams())
    assert (text.sampling.max_tokens, text.sampling.temperature) == (16, 0.0)
    assert (ids.index, ids.prompt, ids.prompt_token_ids) == (1, None, (3, 4))
    assert ids.sampling == SamplingParams(max_tokens=2, temperature=1.0, seed=9, ignore_eos=True)
    assert isinstance(ids.sampling.temperature, float)
    assert read_prompts(path, want_logits=True)[0].sampling.want_logits


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "prompt: give prompt or prompt_token_ids, not neither"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt: give prompt or prompt_token_ids, not both"),
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt": None}, "prompt: must be a string, not null"),
        ({"prompt": ["a"]}, "prompt: must be a string, not a list"),
        ({"prompt_token_ids": []}, "prompt_token_ids: is empty"),
        ({"prompt_token_ids": "1"}, "prompt_token_ids: must be a list of integers, not a string"),
        ({"prompt_token_ids": [1, "2"]}, r"prompt_token_ids\[1\]: must be an integer"),
        ({"prompt_token_ids": [1, True]}, r"prompt_token_ids\[1\]: must be an integer"),
        ({"prompt_token_ids": [1, -2]}, r"prompt_token_ids\[1\]: is -2, must be 0 or more"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: is 0, must be 1 or more"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens: is -1, must be 1 or more"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens: must be an integer, not a string"),
        ({"prompt": "a", "max_tokens": 5.0}, "max_tokens: must be an integer, not 5.0"),
        ({"prompt": "a", "temperature": -0.1}, "temperature: is -0.1, must be 0 or more"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: must be a number"),
        ({"prompt": "a", "seed": -1}, "seed: is -1, must be 0 or more"),
        ({"prompt": "a", "seed": 2**63}, "seed: is 9223372036854775808, too large"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos: must be true or false, not 1"),
        ({"prompt": "a", "max_token": 5}, "max_token: unknown field; did you mean max_tokens?"),
        ({"prompt": "a", "stop": "x"}, "stop: unknown field; known are prompt, prompt_token_ids"),
        ("{", "not JSON"),
        ('"a"', "must be a JSON object, not a string"),
    ],
)
def test_complaints_name_file_line_and_field(prompts, line, message):
    path = prompts({"prompt": "fine"}, line)
    with pytest.raises(InputError, match=message) as raised:
        read_prompts(path)
    assert str(raised.value).startswith(f"{path}:2: ")


def test_text_and_ids_become_token_ids(prompts):
    text, ids = read_prompts(prompts({"prompt": "ab"}, {"prompt_token_ids": [5, 6, 7], "max_tokens": 1}))
    assert prompt_ids(text, encode=codes, vocab_size=512, max_tokens=18) == [97, 98]
    assert prompt_ids(ids, encode=codes, vocab_size=8, max_tokens=4) == [5, 6, 7]


def test_what_the_model_cannot_take_is_refused(prompts):
    text, ids = read_prompts(prompts({"prompt": "ab"}, {"prompt_token_ids": [5, 6, 7], "max_tokens": 1}))
    with pytest.raises(
        InputError, match=r"in.jsonl:2: prompt_token_ids\[2\]: is 7, the vocabulary ends at 6"
    ):
        prompt_ids(ids, encode=codes, vocab_size=7, max_tokens=10)
    with pytest.raises(
        InputError, match="in.jsonl:1: max_tokens: 2 .* are 18, .* 17; max_tokens up to 15 would fit"
    ):
        prompt_ids(text, encode=codes, vocab_size=512, max_tokens=17)
    with pytest.raises(InputError, match="prompt alone is too long"):
        prompt_ids(ids, encode=codes, vocab_size=512, max_tokens=3)
    with pytest.raises(InputError, match="in.jsonl:1: prompt: has no tokens"):
        prompt_ids(text, encode=lambda _: [], vocab_size=512, max_tokens=17)


def test_results_are_lines_in_input_order(tmp_path):
    path = tmp_path / "out.jsonl"
    write_results(
        path,
        [
            GenerateResult(index=1, token_ids=(), text="", finish_reason="error", error="no room"),
            GenerateResult(index=0, token_ids=(1, 2), text='é"\n', finish_reason="stop"),
        ],
    )
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"index": 0, "token_ids": [1, 2], "text": 'é"\n', "finish_reason": "stop"},
        {"index": 1, "token_ids": [], "text": "", "finish_reason": "error", "error": "no room"},
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_unwritable_results_leave_nothing_behind(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_results(tmp_path / "no" / "out.jsonl", [])
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_results(tmp_path / "folder", [])
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_writability_is_known_before_the_work(tmp_path):
    require_writable(tmp_path / "out.jsonl")
    with pytest.raises(InputError, match="does not exist"):
        require_writable(tmp_path / "no" / "out.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        require_writable(tmp_path)
    assert not list(tmp_path.iterdir())


def test_logits_name_their_prompts(tmp_path):
    path = tmp_path / "F"  # numpy would append .npz to a name, not to ours
    rows = {2: np.arange(4, dtype=np.float32), 0: np.ones(4, np.float32)}
    write_logits(path, rows, vocab_size=4)
    with np.load(path) as saved:
        assert saved["index"].tolist() == [0, 2]
        assert saved["logits"].tolist() == [[1, 1, 1, 1], [0, 1, 2, 3]]
        assert saved["logits"].dtype == np.float32
    write_logits(path, {}, vocab_size=4)
    with np.load(path) as saved:
        assert saved["logits"].shape == (0, 4)
