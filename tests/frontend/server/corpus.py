"""Malformed and hostile requests: (path, body) by name. Each deserves a 4xx that says what is wrong."""

import json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_HI = [{"role": "user", "content": "hi"}]


def _completion(**fields) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"model": "stub", "prompt": "hi", **fields}).encode()


def _chat(**fields) -> tuple[str, bytes]:
    return CHAT, json.dumps({"model": "stub", "messages": _HI, **fields}).encode()


def _schema(schema) -> tuple[str, bytes]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _chat(response_format=form)


def _nested(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

HOSTILE: dict[str, tuple[str, bytes]] = {
    "empty body": (COMPLETIONS, b""),
    "truncated JSON": (COMPLETIONS, b'{"model": "stub", "prompt": "hi"'),
    "not JSON": (COMPLETIONS, b"prompt=hi"),
    "an array": (COMPLETIONS, b"[]"),
    "null": (CHAT, b"null"),
    "not UTF-8": (COMPLETIONS, b'{"model": "stub", "prompt": "\xff\xfe"}'),
    "half a surrogate": (COMPLETIONS, rb'{"model": "stub", "prompt": "\ud83d"}'),
    "deep JSON": (COMPLETIONS, b'{"a":' * 100_000),
    "deep array": (CHAT, b'{"messages":' + b"[" * 100_000),
    "10 MB": (COMPLETIONS, b'{"model": "stub", "prompt": "' + b"a" * 10_000_000 + b'"}'),
    "no model": (COMPLETIONS, b'{"prompt": "hi"}'),
    "unknown model": _completion(model="other"),
    "model is a number": _completion(model=3),
    "no prompt": (COMPLETIONS, b'{"model": "stub"}'),
    "empty prompt": _completion(prompt=""),
    "empty prompt in a list": _completion(prompt=[""]),
    "no prompts": _completion(prompt=[]),
    "prompt of null": _completion(prompt=None),
    "prompt of floats": _completion(prompt=[1.5]),
    "prompt of booleans": _completion(prompt=[True]),
    "prompt of negative ids": _completion(prompt=[-1]),
    "prompt beyond the vocabulary": _completion(prompt=[10_000_000]),
    "an empty list of ids": _completion(prompt=[[1], []]),
    "mixed prompts": _completion(prompt=["a", 1]),
    "prompt too long": _completion(prompt=[5] * 601),
    "prompt without room": _completion(prompt=[5] * 600),
    "too many prompts": _completion(prompt=["a"] * 17),
    "top_k -1": _completion(top_k=-1),
    "temperature -1": _completion(temperature=-1),
    "temperature NaN": (COMPLETIONS, b'{"model": "stub", "prompt": "hi", "temperature": NaN}'),
    "temperature 1e999": (COMPLETIONS, b'{"model": "stub", "prompt": "hi", "temperature": 1e999}'),
    "temperature true": _completion(temperature=True),
    "top_p 0": _completion(top_p=0),
    "top_p 1.1": _completion(top_p=1.1),
    "min_p 2": _completion(min_p=2),
    "repetition_penalty 0": _completion(repetition_penalty=0),
    "presence_penalty 3": _completion(presence_penalty=3),
    "max_tokens 0": _completion(max_tokens=0),
    "max_tokens 1e9": _completion(max_tokens=1_000_000_000),
    "max_tokens as text": _completion(max_tokens="5"),
    "max_tokens 2.5": _completion(max_tokens=2.5),
    "min_tokens over max_tokens": _completion(min_tokens=9, max_tokens=8),
    "n 0": _completion(n=0),
    "n 1000": _completion(n=1000),
    "best_of": _completion(best_of=2),
    "suffix": _completion(suffix="x"),
    "logprobs 100": _completion(logprobs=100),
    "stop of nothing": _completion(stop=""),
    "too many stops": _completion(stop=["a"] * 17),
    "stop id beyond the vocabulary": _completion(stop_token_ids=[10_000_000]),
    "logit_bias on no id": _completion(logit_bias={"x": 1}),
    "logit_bias of 101": _completion(logit_bias={"5": 101}),
    "stream_options alone": _completion(stream_options={"include_usage": True}),
    "a typo": _completion(max_token=5),
    "no messages": _chat(messages=[]),
    "messages of text": _chat(messages="hi"),
    "a robot": _chat(messages=[{"role": "robot", "content": "hi"}]),
    "no content": _chat(messages=[{"role": "user"}]),
    "a picture": _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    "a template that refuses": _chat(messages=[{"role": "tool", "content": "x", "tool_call_id": ""}]),
    "top_logprobs alone": _chat(top_logprobs=2),
    "two max_tokens": _chat(max_tokens=2, max_completion_tokens=2),
    "tool_choice without tools": _chat(tool_choice="required"),
    "an unknown tool": _chat(tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
    "tools with one name": _chat(tools=[_TOOL, _TOOL]),
    "a function without a name": _chat(tools=[{"type": "function", "function": {"name": ""}}]),
    "an unknown format": _chat(response_format={"type": "xml"}),
    "a format without its schema": _chat(response_format={"type": "json_schema"}),
    "a deep schema": _schema(_nested(40)),
    "a schema deeper than JSON may be": _schema(_nested(300)),
    "a large schema": _schema({"enum": ["x" * 100] * 1000}),
    "a schema with an odd type": _schema({"type": "text"}),
    "an endless list": _schema({"type": "array", "minItems": 10**9}),
    "a catastrophic regex": _schema({"type": "string", "pattern": "(a+)+$"}),
    "a large regex": _schema({"type": "string", "pattern": "((a{20}){20}){20}"}),
    "a broken regex": _schema({"type": "string", "pattern": "(a"}),
    "reasoning_effort": _chat(reasoning_effort="high"),
    "min_tokens of JSON": _chat(min_tokens=1, response_format={"type": "json_object"}),
    "tokens of text": ("/detokenize", b'{"tokens": ["a"]}'),
    "tokens beyond the vocabulary": ("/detokenize", b'{"tokens": [10000000]}'),
    "no text": ("/tokenize", b"{}"),
}
