"""The API in process, in front of outputs written in advance."""

import asyncio
import json
import threading
import time

import httpx
import openai
import pytest
from opentelemetry import trace

from moe_runtime.engine.balancing.wire import BalancingStatus
from moe_runtime.engine.messages import Logprobs
from moe_runtime.frontend.openai.forms import CompletionForm
from moe_runtime.frontend.openai.logprobs import LogprobFormat
from moe_runtime.frontend.server import reply
from moe_runtime.frontend.server.lifecycle import finish
from moe_runtime.frontend.text.vocabulary import Vocabulary
from moe_runtime.spec.requests import Structure
from tests.frontend.server import stub
from tests.frontend.server.corpus import CHAT, COMPLETIONS, HOSTILE
from tests.frontend.server.stub import StubServer, rank_status

HI = [{"role": "user", "content": "hi"}]
TOOLS: list[dict] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def run(model, story, **options):
    """Run `await story(server, http)` against a fresh server."""

    async def go():
        server = stub.make_server(model, **options)
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await asyncio.wait_for(story(server, http), 20)
        assert server.backend.running == {}
        assert server.service.num_requests == 0
        assert server.service.admission.num_requests == 0

    asyncio.run(go())


def talk(model, story, **options):
    """The same with the official client."""

    async def go(server, http):
        client = openai.AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http, max_retries=0)
        await story(server, client)

    run(model, go, **options)


def events(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# -- what is refused ------------------------------------------------------------------------------


def test_hostile_requests_are_refused_and_the_next_good_one_works(model):
    assert len(HOSTILE) >= 60

    async def story(server, http):
        for name, (path, body) in HOSTILE.items():
            answer = await http.post(path, content=body)
            assert 400 <= answer.status_code < 500, (name, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, name
            assert error["message"], name
            good = await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"})
            assert good.status_code == 200, name

    run(model, story)


@pytest.mark.parametrize(
    ("name", "param", "code", "status"),
    [
        ("suffix", "suffix", "unknown_parameter", 400),
        ("a typo", "max_token", "unknown_parameter", 400),
        ("top_k -1", "top_k", "invalid_value", 400),
        ("no prompt", "prompt", "missing_parameter", 400),
        ("unknown model", "model", "model_not_found", 404),
        ("max_tokens 1e9", "max_tokens", "context_length_exceeded", 400),
        ("prompt too long", "prompt", "context_length_exceeded", 400),
        ("empty prompt", "prompt", "empty_prompt", 400),
        ("an empty list of ids", "prompt", "invalid_value", 400),
        ("a picture", "messages[0].content", "invalid_value", 400),
        ("a catastrophic regex", "response_format.json_schema.schema", None, 400),
        ("10 MB", None, "body_too_large", 413),
    ],
)
def test_refusals_name_the_field(model, name, param, code, status):
    async def story(server, http):
        path, body = HOSTILE[name]
        answer = await http.post(path, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code)

    run(model, story)


def test_what_does_not_fit_is_refused_with_what_would(model):
    async def story(server, http):
        asked = {"model": "stub", "prompt": [5] * 550, "max_tokens": 51}
        answer = await http.post(COMPLETIONS, json=asked)
        assert answer.status_code == 400
        assert "max_tokens up to 50 would fit" in answer.json()["error"]["message"]
        server.backend.outputs = ["a " * 100]
        answer = await http.post(COMPLETIONS, json={**asked, "max_tokens": 50})
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 50

    run(model, story)


def test_a_body_of_unknown_length_is_limited_too(model):
    async def chunks():
        for _ in range(64):
            yield b" " * 65536

    async def story(server, http):
        answer = await http.post(COMPLETIONS, content=chunks())
        assert answer.status_code == 413

    run(model, story)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"content-encoding": "gzip"}, "content-encoding"),
        ({"connection": "upgrade", "upgrade": "h2c"}, "upgrade"),  # what some clients send at first
    ],
)
def test_a_body_that_would_not_arrive_as_it_is_is_refused_by_its_header(model, headers, param):
    async def story(server, http):
        answer = await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"}, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert (await http.get("/v1/models", headers=headers | {"content-encoding": "identity"})).is_success

    run(model, story)


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models"])
def test_what_can_be_got_can_be_asked_for_its_head(model, path):
    async def story(server, http):
        head, get = await http.head(path), await http.get(path)
        assert head.status_code == get.status_code == 200
        assert head.headers["content-type"] == get.headers["content-type"]
        assert (await http.head(COMPLETIONS)).status_code == 405

    run(model, story)


def test_keys(model):
    async def story(server, http):
        asked = {"model": "stub", "prompt": "hi"}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic a-key"}):
            answer = await http.post(COMPLETIONS, json=asked, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        good = {"authorization": "Bearer a-key"}
        assert (await http.post(COMPLETIONS, json=asked, headers=good)).status_code == 200
        assert (await http.get("/admin/advice", headers=good)).status_code == 401
        assert (await http.get("/admin/advice", headers={"authorization": "Bearer root"})).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/"):
            assert (await http.get(path)).status_code == 200

    run(model, story, keys=["other", "a-key"], admin_keys=["root"])


def test_admin_is_closed_without_a_key(model):
    async def story(server, http):
        assert (await http.post("/admin/drain")).status_code == 403
        assert not server.service.admission.draining

    run(model, story)


def test_a_checkpoint_without_a_template_has_no_chat(tmp_path):
    bare = stub.read_model(stub.write_checkpoint(tmp_path, template=None))

    async def story(server, http):
        answer = await http.post(CHAT, json={"model": "stub", "messages": HI})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_chat_template"

    run(bare, story)


# -- what is answered -----------------------------------------------------------------------------


def test_the_form_of_a_stream(model):
    async def story(server: StubServer, http):
        asked = {"model": "stub", "prompt": "hi", "stream": True}
        server.backend.outputs = ["漢字 and 😀"]
        plain = events((await http.post(COMPLETIONS, json=asked)).text)
        assert "".join(e["choices"][0]["text"] for e in plain) == "漢字 and 😀"
        assert len(plain) > 3
        assert all("usage" not in e for e in plain)
        assert [e["choices"][0]["finish_reason"] for e in plain] == [None] * (len(plain) - 1) + ["stop"]
        with_none = events((await http.post(COMPLETIONS, json={**asked, "stream_options": {}})).text)
        assert all("usage" not in e for e in with_none)
        options = {"include_usage": True}
        counted = events((await http.post(COMPLETIONS, json={**asked, "stream_options": options})).text)
        assert all(e["usage"] is None and e["choices"] for e in counted[:-1])
        assert counted[-1]["choices"] == []
        usage = counted[-1]["usage"]
        whole = (await http.post(COMPLETIONS, json={**asked, "stream": False})).json()
        assert whole["choices"][0]["text"] == "漢字 and 😀"
        assert whole["usage"] == usage
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    run(model, story)


@pytest.mark.parametrize("output", ["DEFGHIJK", "xxDEFGHIJ", "DEFGHIX", "DEFGHI"])
def test_stop_strings_streamed_and_whole(model, output):
    async def story(server, client):
        server.backend.outputs = [output]
        asked = {"model": "stub", "prompt": "hi", "stop": ["DEFGHIJ"], "max_tokens": 100}
        whole = await client.completions.create(**asked)
        text, reason = "", None
        async for chunk in await client.completions.create(**asked, stream=True):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason
        expected = output.partition("DEFGHIJ")[0]
        assert (text, reason) == (expected, "stop")
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")

    talk(model, story)


def test_prompts_copies_echo_and_seeds(model):
    async def story(server: StubServer, client):
        server.backend.outputs = [f"out {i}" for i in range(6)] + ["x"]
        answer = await client.completions.create(
            model="stub", prompt=["one", "two", "three"], n=2, echo=True, seed=-7
        )
        assert [c.index for c in answer.choices] == list(range(6))
        echoed = ["one", "one", "two", "two", "three", "three"]
        assert [c.text for c in answer.choices] == [f"{p}out {i}" for i, p in enumerate(echoed)]
        seeds = [r.sampling.seed for r in server.backend.submitted]
        assert seeds[0] == seeds[2] == 2**63 - 7
        assert len(set(seeds)) == 2
        assert all(0 <= s < 2**63 for s in seeds)
        prompts = len([i for p in ("one", "two", "three") for i in server.backend.tokenizer.encode(p)])
        assert answer.usage.prompt_tokens == prompts
        stream = await client.completions.create(
            model="stub", prompt=[[5, 6], [7]], n=2, echo=True, stream=True
        )
        texts = [""] * 4
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        decode = server.backend.tokenizer.decode
        assert texts == [decode([5, 6]) + "x", decode([5, 6]) + "x", decode([7]) + "x", decode([7]) + "x"]

    talk(model, story)


def test_sampling_parameters_reach_the_rank(model):
    async def story(server: StubServer, http):
        asked = {
            "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "presence_penalty": 1,
            "max_tokens": 9, "frequency_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"7": -3.5},
            "min_tokens": 2, "stop_token_ids": [8], "ignore_eos": True, "seed": 5, "logprobs": 2,
        }  # fmt: skip
        extra = {"model": "stub", "prompt": "hi", "priority": -2, "cache_salt": "s"}
        answer = await http.post(COMPLETIONS, json={**extra, **asked}, headers={"X-Rank": "3"})
        assert answer.status_code == 200
        (request,) = server.backend.submitted
        expected = {**asked, "logit_bias": {7: -3.5}}
        assert {name: getattr(request.sampling, name) for name in asked} == expected
        assert (request.priority, request.cache_salt) == (-2, "s")
        assert server.backend.ranks_chosen == [3]
        await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi", "stop": None, "top_k": None})
        plain = server.backend.submitted[-1].sampling
        assert (plain.temperature, plain.top_p, plain.top_k, plain.max_tokens) == (1.0, 1.0, 0, 16)

    run(model, story)


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


def test_reasoning_is_apart(model):
    async def story(server: StubServer, client):
        server.backend.outputs = ["let me think</think>the answer"]
        asked = {"model": "stub", "messages": HI, "extra_body": {"chat_template_kwargs": {"thinking": True}}}
        message = (await client.chat.completions.create(**asked)).choices[0].message
        assert (message.content, message.reasoning_content) == ("the answer", "let me think")
        content = reasoning = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            content += chunk.choices[0].delta.content or ""
            reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        assert (content, reasoning) == ("the answer", "let me think")

    talk(model, story)


def test_tools(model):
    async def story(server: StubServer, client):
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
        server.backend.outputs = ["I look.\n" + call + "\n" + call]
        asked = {"model": "stub", "messages": HI, "tools": TOOLS, "max_tokens": 150}
        choice = (await client.chat.completions.create(**asked)).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look.\n"
        assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [{"city": "東京"}] * 2
        assert len({c.id for c in choice.message.tool_calls}) == 2
        names, arguments = [], ["", ""]
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                names += [part.function.name] if part.function.name else []
                arguments[part.index] += part.function.arguments or ""
            reason = chunk.choices[0].finish_reason
        assert (names, reason) == (["weather"] * 2, "tool_calls")
        assert [json.loads(a) for a in arguments] == [{"city": "東京"}] * 2
        history = [
            *HI,
            choice.message.model_dump(exclude_unset=True),
            {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "sunny"},
        ]
        server.backend.outputs = ["It is sunny."]
        again = await client.chat.completions.create(**{**asked, "messages": history})
        assert again.choices[0].message.content == "It is sunny."
        none = await client.chat.completions.create(**asked, tool_choice="none")
        assert none.choices[0].message.tool_calls is None

    talk(model, story)


def structures(server: StubServer) -> list[Structure | None]:
    """What the outputs so far were constrained to."""
    return [r.sampling.structure for r in server.backend.submitted]


def test_forced_tools_are_constrained_outputs(model):
    async def story(server: StubServer, client):
        server.backend.outputs = ['{"city": "Rome"}', '[{"name": "weather", "parameters": {"city": "Rome"}}]']
        named = {"type": "function", "function": {"name": "weather"}}
        asked = {"model": "stub", "messages": HI, "tools": TOOLS, "max_tokens": 80}
        first = (await client.chat.completions.create(**asked, tool_choice=named)).choices[0]
        assert first.message.tool_calls[0].function.arguments == '{"city": "Rome"}'
        assert first.finish_reason == "stop"
        second = (await client.chat.completions.create(**asked, tool_choice="required")).choices[0]
        assert json.loads(second.message.tool_calls[0].function.arguments) == {"city": "Rome"}
        assert second.finish_reason == "tool_calls"
        schemas: list = [json.loads(s.schema) for s in structures(server) if s is not None]
        assert schemas[0] == TOOLS[0]["function"]["parameters"]
        assert schemas[1]["items"]["anyOf"][0]["properties"]["name"] == {"const": "weather"}

    talk(model, story)


def test_response_formats(model):
    async def story(server: StubServer, client):
        server.backend.outputs = ["{}"]
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        formats = [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        ]
        for form in formats:
            await client.chat.completions.create(model="stub", messages=HI, response_format=form)
        free, any_json, given = structures(server)
        assert free is None
        assert any_json == Structure(kind="json")
        assert given is not None
        assert json.loads(given.schema) == schema

    talk(model, story)


def test_models_and_tokens(model):
    async def story(server, http):
        models = (await http.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == ["stub"]
        assert (await http.get("/v1/models/stub")).json()["max_model_len"] == stub.LONGEST
        assert (await http.get("/v1/models/none")).status_code == 404
        tokens = (await http.post("/tokenize", json={"prompt": "naïve 漢字"})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "naïve 漢字"}
        lost = await http.get("/v1/nothing")
        assert (lost.status_code, set(lost.json())) == (404, {"error"})
        wrong = await http.get(COMPLETIONS)
        assert (wrong.status_code, set(wrong.json())) == (405, {"error"})

    run(model, story)


def test_errors_are_the_clients_exceptions(model):
    async def story(server, client):
        server.backend.missing = ["decode-0 rank 1"]
        with pytest.raises(openai.InternalServerError) as starting:
            await client.completions.create(model="stub", prompt="hi")
        assert "decode-0 rank 1" in str(starting.value)
        assert starting.value.response.headers["retry-after"]
        server.backend.missing = []
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="stub", prompt="hi", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt", prompt="hi")

    talk(model, story)


# -- how requests end -----------------------------------------------------------------------------


async def until(condition, seconds: float = 5.0) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def open_request(server: StubServer, *, stream: bool, chunks: int = 0):
    """Send a request as a server hears it; returns the task, what was sent, and a function that hangs up.

    Its output stops after as many tokens as `chunks`, until `hold` is set.
    """
    if chunks:
        server.backend.hold_after = chunks
    body = json.dumps({"model": "stub", "prompt": "hi", "stream": stream}).encode()
    inbox: asyncio.Queue = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "headers": [(b"x-request-id", b"mine")],
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    task = asyncio.create_task(server.app(scope, inbox.get, send))
    await until(lambda: len(server.backend.running) > 0)
    await until(lambda: len(sent) > chunks or not chunks)
    return task, sent, lambda: inbox.put_nowait({"type": "http.disconnect"})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chunks", [0, 3])
def test_a_client_that_hangs_up_ends_its_request(model, stream, chunks):
    async def story(server: StubServer, http):
        server.backend.outputs = ["word " * 100]
        if not chunks:
            server.backend.hold.clear()
        elif not stream:
            return  # there is nothing to see before the end
        task, sent, hang_up = await open_request(server, stream=stream, chunks=chunks)
        hang_up()
        await until(task.done)
        assert server.backend.running == {}
        assert json.loads(server.lines[-1])["status"] == 499

    run(model, story)


def test_an_administrator_ends_a_request(model):
    async def story(server: StubServer, http):
        server.backend.hold.clear()
        task, sent, _ = await open_request(server, stream=False)
        root = {"authorization": "Bearer root"}
        assert (await http.post("/admin/abort/other", headers=root)).status_code == 404
        assert (await http.post("/admin/abort/mine", headers=root)).json() == {"aborted": 1}
        await until(task.done)
        assert sent[0]["status"] == 499

    run(model, story, admin_keys=["root"])


@pytest.mark.parametrize("stream", [True, False])
def test_time_is_limited(model, stream):
    async def story(server: StubServer, http):
        watch = asyncio.create_task(server.service.watch_deadlines())
        server.backend.hold.clear()
        asked = {"model": "stub", "prompt": "hi", "stream": stream}
        answer = await http.post(COMPLETIONS, json=asked, headers={"x-request-timeout": "0.05"})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        assert "0.05 s" in answer.json()["error"]["message"]
        for bad in ("soon", "-1", "nan", "1e9"):
            refused = await http.post(COMPLETIONS, json=asked, headers={"x-request-timeout": bad})
            assert refused.status_code == 400
        watch.cancel()

    run(model, story)


def test_a_rank_that_refuses_is_a_bad_request(model):
    async def story(server: StubServer, http):
        server.backend.refuse = "unified: no such schema"
        answer = await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi", "stream": True})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "unified: no such schema"

    run(model, story)


def test_a_stream_that_fails_says_so(model):
    async def story(server: StubServer, http):
        server.backend.outputs = ["word " * 60]
        task, sent, _ = await open_request(server, stream=True, chunks=3)
        server.service.fail_all(stub.shutting_down())
        await until(task.done)
        assert b'"code":"shutting_down"' in sent[-1]["body"]
        assert b"[DONE]" not in sent[-1]["body"]
        assert sent[-1]["more_body"] is False

    run(model, story)


def test_too_many_requests_are_told_when_to_come_back(model):
    async def story(server: StubServer, http):
        server.backend.hold.clear()
        asked = {"model": "stub", "prompt": "hi"}
        waiting = [asyncio.create_task(http.post(COMPLETIONS, json=asked)) for _ in range(4)]
        await until(lambda: len(server.backend.running) == 4)
        answer = await http.post(COMPLETIONS, json=asked)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        urgent = asyncio.create_task(http.post(COMPLETIONS, json={**asked, "priority": -1}))
        await until(lambda: any(w.done() for w in waiting))
        server.backend.hold.set()
        statuses = sorted([(await w).status_code for w in waiting] + [(await urgent).status_code])
        assert statuses == [200, 200, 200, 200, 429]

    run(model, story, queue=2)


@pytest.mark.parametrize("asked", [{"n": 5}, {"prompt": ["ab"] * 5}])
def test_outputs_that_could_never_be_let_in_together_are_not_told_to_come_back(model, asked):
    async def story(server, http):
        answer = await http.post(
            COMPLETIONS, json={"model": "stub", "prompt": "hi", "max_tokens": 1, **asked}
        )
        assert answer.status_code == 400
        assert "retry-after" not in answer.headers
        assert answer.json()["error"]["param"] == "n"
        assert "5 outputs at once, at most 4 are let in" in answer.json()["error"]["message"]

    run(model, story, queue=2)


@pytest.mark.parametrize(
    ("asked", "grace", "why"), [(1, 0.05, "grace time of 0.05 s"), (2, 60.0, "told to stop now")]
)
def test_what_outlasts_the_grace_time_or_a_second_signal_is_told_so(model, asked, grace, why):
    async def story(server: StubServer, http):
        server.backend.outputs = ["word " * 60]
        streamed, sent, _ = await open_request(server, stream=True, chunks=3)
        server.backend.hold.clear()
        waiting = asyncio.create_task(http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"}))
        await until(lambda: len(server.backend.running) == 2)
        for _ in range(asked):
            server.ending.ask()
        await finish(server.service, server.ending, grace)
        await until(streamed.done)
        last = json.loads(sent[-1]["body"].rpartition(b"data: ")[2])
        assert last["error"]["code"] == "shutting_down"
        assert why in last["error"]["message"]
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")

    run(model, story)


def test_a_server_that_is_full_and_moves_experts_is_alive_and_ready(model):
    async def story(server: StubServer, http):
        server.backend.hold.clear()
        asked = {"model": "stub", "prompt": "hi"}
        running = [asyncio.create_task(http.post(COMPLETIONS, json=asked)) for _ in range(4)]
        await until(lambda: len(server.backend.running) == 4)
        for epoch in range(3):
            now = time.monotonic()
            moving = BalancingStatus(epoch=epoch, moves=9, moved_bytes=9, stall_seconds=epoch, aborted=0)
            server.service.metrics.board.observe(rank_status(0, now, running=4, balancing=moving), now)
            assert (await http.post(COMPLETIONS, json=asked)).status_code == 429
            assert (await http.get("/health")).json() == {"status": "ok", "silent": []}
            assert (await http.get("/ready")).status_code == 200
        assert b"moe_runtime_expert_moves_total" in (await http.get("/metrics")).content
        server.backend.hold.set()
        await asyncio.gather(*running)

    run(model, story, queue=2)


def test_a_rank_that_falls_silent_is_named(model, monkeypatch):
    async def story(server: StubServer, http):
        clock = [1000.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        assert (await http.get("/health")).json() == {"status": "ok", "silent": []}
        board = server.service.metrics.board
        board.observe(rank_status(0, 1020.0), 1020.0)
        clock[0] = 1049.0
        assert (await http.get("/health")).status_code == 200
        clock[0] = 1051.0
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()["silent"]) == (503, ["unified-0 rank 0"])

    async def go():
        server = stub.make_server(model)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=server.app), base_url="http://x"
        ) as http:
            await story(server, http)

    asyncio.run(go())


def test_draining(model):
    async def story(server: StubServer, http):
        assert (await http.get("/ready")).json() == {"status": "ready", "not_ready": []}
        server.backend.hold.clear()
        task, sent, _ = await open_request(server, stream=False)
        root = {"authorization": "Bearer root"}
        assert (await http.post("/admin/drain", headers=root)).json() == {"status": "draining", "running": 1}
        assert (await http.get("/ready")).status_code == 503
        refused = await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        server.backend.hold.set()
        await until(task.done)
        assert sent[0]["status"] == 200

    run(model, story, admin_keys=["root"])


def test_request_ids_are_echoed_and_may_be_equal(model):
    async def story(server: StubServer, http):
        asked, headers = {"model": "stub", "prompt": "hi"}, {"x-request-id": "same"}
        both = await asyncio.gather(*(http.post(COMPLETIONS, json=asked, headers=headers) for _ in range(2)))
        assert [(a.status_code, a.headers["x-request-id"]) for a in both] == [(200, "same")] * 2
        odd = await http.post(COMPLETIONS, json=asked, headers={"x-request-id": "a b"})
        assert odd.headers["x-request-id"].startswith("req-")
        line = json.loads(server.lines[0])
        assert (line["request_id"], line["status"], line["finish"]) == ("same", 200, "stop")

    run(model, story)


def test_spans_continue_the_callers_trace(model, monkeypatch):
    started: list[tuple] = []

    class Tracer:
        def start_span(self, name, context, attributes, **_):
            started.append((name, trace.get_current_span(context).get_span_context().trace_id, attributes))
            return trace.INVALID_SPAN

    monkeypatch.setattr(trace, "get_tracer", lambda name: Tracer())

    async def story(server: StubServer, http):
        headers = {"traceparent": f"00-{0xABC:032x}-{1:016x}-01"}
        await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"}, headers=headers)
        ((name, trace_id, attributes),) = started
        assert (name, trace_id) == ("POST /v1/completions", 0xABC)
        assert attributes["moe_runtime.output_tokens"] > 0

    run(model, story)


def test_metrics_count_what_clients_saw(model):
    async def story(server: StubServer, http):
        await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi", "max_tokens": 2, "n": 2})
        await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi", "max_tokens": 0})
        text = (await http.get("/metrics")).text
        assert 'moe_runtime_requests_total{finish_reason="length",frontend="0"} 2.0' in text
        assert 'moe_runtime_time_to_first_token_seconds_count{frontend="0"} 2.0' in text
        assert 'moe_runtime_inter_token_latency_seconds_count{frontend="0"} 2.0' in text

    run(model, story)
