"""Logprobs in answers: of outputs, and of prompts that are repeated with them."""

import threading

import pytest

from moe_runtime.engine.messages import Logprobs
from moe_runtime.frontend.openai.forms import CompletionForm
from moe_runtime.frontend.openai.logprobs import LogprobFormat
from moe_runtime.frontend.server import reply
from moe_runtime.frontend.text.vocabulary import Vocabulary
from tests.frontend.server.client import HI, run, talk
from tests.frontend.server.corpus import COMPLETIONS
from tests.frontend.server.stub import StubServer


def test_logprobs_in_both_forms(model):
    async def story(server: StubServer, client):
        server.backend.outputs = ["a漢"]
        answer = await client.completions.create(model="stub", prompt="hi", logprobs=2)
        listed = answer.choices[0].logprobs
        assert listed.tokens[0] == "a"
        assert listed.token_logprobs[0] == -0.5
        assert listed.top_logprobs[0]["a"] == -0.5
        assert min(listed.top_logprobs[0].values()) == -9999.0
        assert listed.text_offset[:2] == [0, 1]
        assert len(listed.tokens) == answer.usage.completion_tokens
        asked = {"model": "stub", "messages": HI, "logprobs": True, "top_logprobs": 1}
        chat = await client.chat.completions.create(**asked)
        entries = chat.choices[0].logprobs.content
        shown = b"".join(bytes(e.bytes) for e in entries)
        assert shown == "a漢</s>".encode()
        assert [t.token for t in entries[0].top_logprobs] == ["a"]
        streamed = b""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            if chunk.choices[0].logprobs:
                streamed += b"".join(bytes(e.bytes) for e in chunk.choices[0].logprobs.content)
        assert streamed == shown

    talk(model, story)


EVALUATED = {"model": "stub", "prompt": "a漢b", "logprobs": 2, "echo": True}


def test_prompts_are_echoed_with_their_logprobs(model):
    """As evaluation harnesses ask: texts and token ids, several at once, with a token to follow or none."""

    async def story(server: StubServer, client):
        encode = server.backend.tokenizer.encode
        server.backend.outputs = ["xy"]
        ids = encode("a漢b")
        answer = await client.completions.create(**EVALUATED, max_tokens=1, n=2)
        for choice in answer.choices:
            assert choice.text == "a漢bx"
            listed = choice.logprobs
            assert len(listed.tokens) == len(ids) + 1
            assert listed.token_logprobs == [None, *(-float(p) for p in range(1, len(ids))), -0.5]
            assert listed.top_logprobs[0] is None
            assert all(max(best.values()) == chosen for best, chosen in rest_of(listed))
            assert listed.text_offset == [0, *[1] * (len(ids) - 2), 2, 3]
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 2)
        sent = [r.sampling for r in server.backend.submitted]
        assert [(s.prompt_logprobs, s.logprobs) for s in sent] == [(2, 2)] * 2
        several = [ids, [*ids, *encode("cd")], encode("z")]
        answer = await client.completions.create(**{**EVALUATED, "prompt": several}, max_tokens=0)
        assert [c.text for c in answer.choices] == ["a漢b", "a漢bcd", "z"]
        assert [len(c.logprobs.tokens) for c in answer.choices] == list(map(len, several))
        assert answer.choices[2].logprobs.token_logprobs == [None]
        assert {c.finish_reason for c in answer.choices} == {"length"}
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, several)), 0)

    talk(model, story)


def rest_of(listed) -> list[tuple[dict, float]]:
    return list(zip(listed.top_logprobs, listed.token_logprobs, strict=True))[1:]


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_streamed_echoes_are_the_whole_ones(model, max_tokens, long, monkeypatch):
    """Long ones are written by a thread."""
    written = set()
    chunk = CompletionForm.chunk

    def watched(*args):
        written.add(threading.current_thread() is threading.main_thread())
        return chunk(*args)

    monkeypatch.setattr(CompletionForm, "chunk", watched)
    monkeypatch.setattr(reply, "LONG_SCORES", 3 if long else 1000)

    async def story(server: StubServer, client):
        server.backend.outputs = ["xyz"]
        asked = {**EVALUATED, "prompt": ["a漢b", "hello"], "max_tokens": max_tokens, "n": 2}
        whole = await client.completions.create(**asked)
        texts = [""] * 4
        lists: list[list[list]] = [[[], [], [], []] for _ in range(4)]
        async for chunk in await client.completions.create(**asked, stream=True):
            choice = chunk.choices[0]
            if not texts[choice.index]:
                assert choice.text == ("a漢b", "hello")[choice.index // 2]
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                for whole_list, name in zip(lists[choice.index], names, strict=True):
                    whole_list += getattr(choice.logprobs, name)
        assert texts == [c.text for c in whole.choices]
        for one, found in zip(whole.choices, lists, strict=True):
            p = one.logprobs
            assert found == [p.tokens, p.token_logprobs, p.top_logprobs, p.text_offset]
        assert (False in written) == long

    talk(model, story)


def test_an_echo_without_logprobs_needs_none_and_zero_tokens_need_an_echo(model):
    async def story(server: StubServer, http):
        asked = {"model": "stub", "prompt": "hello", "max_tokens": 0}
        answer = await http.post(COMPLETIONS, json={**asked, "echo": True})
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("hello", None, "length")
        for wrong in ({}, {"echo": True, "min_tokens": 1}):
            answer = await http.post(COMPLETIONS, json={**asked, **wrong})
            assert answer.status_code == 400, wrong
            assert answer.json()["error"]["param"] in ("max_tokens", "min_tokens")
        # Nothing follows, so a prompt may take all there is.
        for length, status in ((600, 200), (601, 400)):
            answer = await http.post(COMPLETIONS, json={**asked, "prompt": [5] * length, "echo": True})
            assert answer.status_code == status
        metrics = (await http.get("/metrics")).text
        assert 'requests_total{finish_reason="length",frontend="0"} 2.0' in metrics
        assert server.service.admission._mean_output is None, "they tell nothing of how long outputs are"
        starts = server.service.admission._rate._starts
        assert [tokens for _, tokens in starts] == [len(server.backend.submitted[0].prompt), 600]
        server.backend.refuse = "no room for it"
        answer = await http.post(COMPLETIONS, json={**asked, "echo": True})
        assert (answer.status_code, len(starts)) == (400, 2), "no rank has turned to it"

    run(model, story)


def test_offsets_are_those_of_the_text(model):
    """Special tokens are part of a text that spells them out, and not of one made of ids."""

    async def story(server: StubServer, http):
        encode = server.backend.tokenizer.encode
        text = "a</s>漢b"
        asked = {**EVALUATED, "logprobs": 0, "max_tokens": 0}
        for prompt, echoed in ((text, text), (encode(text), "a漢b")):
            answer = await http.post(COMPLETIONS, json={**asked, "prompt": prompt})
            (choice,) = answer.json()["choices"]
            listed = choice["logprobs"]
            assert choice["text"] == echoed
            assert listed["tokens"][1] == "</s>"
            assert listed["text_offset"][0] == 0
            assert echoed[listed["text_offset"][-1] :] == "b"
            assert echoed[listed["text_offset"][2] :] == "漢b"

    run(model, story)


def test_of_tokens_that_look_alike_the_best_is_listed():
    vocabulary = Vocabulary(
        text_bytes=(b"a", b"\xe6", b"\xe7"), shown_bytes=(b"a", b"\xe6", b"\xe7"), leading_spaces=0
    )
    form = LogprobFormat(vocabulary)
    listed = form.completion([1], [Logprobs(-0.1, [1, 2, 0], [-0.1, -3.0, -4.0])], form.offsets())
    assert listed["top_logprobs"] == [{"\ufffd": -0.1, "a": -4.0}]
