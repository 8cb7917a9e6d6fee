"""What the API answers, in front of outputs written in advance."""

import json

import openai
import pytest

from moe_runtime.spec.requests import Structure
from tests.frontend.server import stub
from tests.frontend.server.client import HI, events, run, talk
from tests.frontend.server.corpus import COMPLETIONS
from tests.frontend.server.stub import StubServer

TOOLS: list[dict] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


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
