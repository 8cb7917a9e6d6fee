"""A real server of two ranks and its clients: the official one, many at once, impatient ones."""

import asyncio
import json
import signal
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.frontend.text.vocabulary import read_vocabulary
from tests.end_to_end.commands import left_running, moe, write_plan
from tests.end_to_end.conftest import MAX_TOKENS
from tests.end_to_end.served import Served, chat_checkpoint, free_port, wait_for
from tests.wall import at_most

pytestmark = pytest.mark.multiproc

# Few blocks, so that many requests at once are preempted.
TIGHT = {"unified": {"expert_parallel": 2, "kv_cache": {"blocks": 160}}}
ROOMY = {"unified": {"expert_parallel": 2}}
SPLIT = {"prefill": {"expert_parallel": 1}, "decode": {"expert_parallel": 1}}
HI = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def checkpoint(checkpoints, tmp_path_factory) -> Path:
    return chat_checkpoint(checkpoints["deepseek_v3"], tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with Served(folder, checkpoint, TIGHT, port=free_port(), timeout_s=100.0) as served:
        yield served


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(api_key="any", base_url=f"{server.url}/v1", max_retries=0, timeout=60)


# -- the official client ----------------------------------------------------------------------------


def test_completions_streamed_and_whole(client):
    asked = {"model": "m", "prompt": "hello there", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 24
    assert len(chunks) > 10


def test_chat_streamed_and_whole(client):
    asked = {"model": "m", "messages": HI, "max_tokens": 12, "temperature": 0.9, "seed": 4}
    whole = client.chat.completions.create(**asked, n=2)
    assert whole.choices[0].message.content != whole.choices[1].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream)
    assert text == whole.choices[0].message.content


def test_logprobs(client):
    asked = {"model": "m", "prompt": "hello there", "max_tokens": 5, "temperature": 0}
    listed = client.completions.create(**asked, logprobs=3).choices[0].logprobs
    assert len(listed.tokens) == len(listed.top_logprobs) == 5
    for chosen, best in zip(listed.token_logprobs, listed.top_logprobs, strict=True):
        assert len(best) == 3
        assert chosen == pytest.approx(max(best.values()))
        assert chosen < 0


def test_what_is_generated_is_scored_alike_as_a_prompt(client, references):
    """As evaluation harnesses ask: token ids, several at once, echoed with nothing or one token to follow."""
    one = next(r for r in references["deepseek_v3"] if len(r.prompt) == 90)
    asked = {"model": "m", "temperature": 0, "logprobs": 3, "extra_body": {"ignore_eos": True}}
    said = client.completions.create(**asked, prompt=one.prompt, max_tokens=6).choices[0].logprobs
    whole, begin = [*one.prompt, *one.tokens[:6]], len(one.prompt)
    first = float(one.logits.log_softmax(-1)[one.tokens[0]])
    for max_tokens in (0, 1):
        answer = client.completions.create(
            **asked, prompt=[whole, one.prompt], echo=True, max_tokens=max_tokens
        )
        scored = answer.choices[0].logprobs
        assert len(scored.tokens) == len(whole) + max_tokens
        assert (scored.token_logprobs[0], scored.top_logprobs[0]) == (None, None)
        assert scored.tokens[begin : len(whole)] == said.tokens
        again = scored.token_logprobs[begin : len(whole)]
        assert again == pytest.approx(said.token_logprobs, abs=4e-4)
        assert again[0] == pytest.approx(first, abs=4e-4)
        alone = answer.choices[1].logprobs
        assert alone.tokens[:begin] == scored.tokens[:begin]
        assert alone.token_logprobs[1:begin] == pytest.approx(scored.token_logprobs[1:begin], abs=4e-4)
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(whole) + begin, 2 * max_tokens)


def test_json_schema_and_tools(client, checkpoint):
    # A random model would put white space between the parts of JSON for ever.
    blank = [i for i, b in enumerate(read_vocabulary(checkpoint).text_bytes) if b and not b.strip()]
    asked = {"model": "m", "messages": HI, "max_tokens": 300, "logit_bias": {str(i): -100 for i in blank}}
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(**asked, response_format=form)
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content)
    assert isinstance(found["ok"], bool)
    assert found["kind"] in ("a", "b")
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "f"}}
    call = client.chat.completions.create(**asked, tools=tools, tool_choice=named)
    assert set(json.loads(call.choices[0].message.tool_calls[0].function.arguments)) == {"ok", "kind"}


def test_a_schema_that_no_rank_can_compile_is_a_bad_request(client):
    schema = {"$ref": "#/$defs/nowhere"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=HI, response_format=form)
    assert client.chat.completions.create(model="m", messages=HI, max_tokens=2).choices


def test_errors_are_the_clients_exceptions(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="m", prompt="x", max_tokens=100_000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(
            model="m", prompt="x", max_tokens=1500, extra_body={"ignore_eos": True}
        )


def test_stop_ids_and_min_tokens(client):
    asked = {"model": "m", "prompt": "hello there", "max_tokens": 12, "temperature": 0}
    free = client.completions.create(**asked, logprobs=0, extra_body={"ignore_eos": True}).choices[0]
    third = free.logprobs.tokens[2]
    first = free.logprobs.tokens.index(third)
    response = httpx.post(f"{client.base_url}".replace("/v1/", "/tokenize"), json={"prompt": third})
    (token,) = response.json()["tokens"]
    stopped = client.completions.create(**asked, extra_body={"stop_token_ids": [token]}).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == "".join(free.logprobs.tokens[:first])
    longer = client.completions.create(**asked, extra_body={"stop_token_ids": [token], "min_tokens": 8})
    assert longer.usage.completion_tokens >= 8


# -- the same tokens ----------------------------------------------------------------------------------


def completions(server: Served, asked: list[list[int]], at_once: int) -> list[dict]:
    """Greedy answers, `at_once` requests at a time."""

    async def go() -> list[dict]:
        turn = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as http:

            async def one(prompt: list[int]) -> dict:
                body = {"model": "m", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
                async with turn:
                    extra = {"ignore_eos": True, "logprobs": 0}
                    answer = await http.post(f"{server.url}/v1/completions", json={**body, **extra})
                assert answer.status_code == 200, answer.text
                return answer.json()

            return await asyncio.gather(*(one(p) for p in asked))

    return asyncio.run(go())


def test_weights_are_reloaded_while_others_are_served(server, client, checkpoints):
    """The same ones, from another folder: what is said does not change."""
    root, ask = {"authorization": "Bearer root"}, {"model": "m", "prompt": "so it goes", "max_tokens": 40}
    before = client.completions.create(**ask, temperature=0).choices[0].text
    stream = client.completions.create(**{**ask, "max_tokens": 120}, temperature=0, stream=True)
    begun = next(iter(stream)).choices[0]
    path = {"path": str(checkpoints["deepseek_v3"])}
    answer = httpx.post(f"{server.url}/admin/reload", json=path, headers=root, timeout=60)
    assert answer.status_code == 200, answer.text
    last = [chunk.choices[0] for chunk in stream if chunk.choices][-1]
    assert (begun.finish_reason, last.finish_reason) == (None, "length")
    assert client.completions.create(**ask, temperature=0).choices[0].text == before
    missing = httpx.post(f"{server.url}/admin/reload", json={"path": "/nowhere"}, headers=root)
    assert missing.status_code == 400
    assert "/nowhere" in missing.json()["error"]["message"]


@pytest.mark.parametrize("at_once", [1, 64])
def test_greedy_tokens_are_those_of_the_reference(server, checkpoint, references, at_once):
    """Alone and 64 at once (which preempts), with the prefix cache cold and warm.

    The tokens and texts of `generate` are compared with the same reference.
    """
    decode = Tokenizer(checkpoint).decode
    shown = [b.decode("utf-8", "replace") for b in read_vocabulary(checkpoint).shown_bytes]
    known = references["deepseek_v3"]
    expected = known[5::4] if at_once == 1 else known * 4
    before = server.metric("preemptions_total")
    for attempt in range(2):
        answers = completions(server, [r.prompt for r in expected], at_once)
        for one, answer in zip(expected, answers, strict=True):
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            assert len(tokens) == MAX_TOKENS
            assert tokens[: one.safe] == [shown[i] for i in one.tokens[: one.safe]]
            assert answer["usage"]["completion_tokens"] == MAX_TOKENS
            if one.safe == MAX_TOKENS:
                assert answer["choices"][0]["text"] == decode(one.tokens)
        cached = sum(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)
        if attempt:
            assert cached > 0
    assert sum(one.safe == MAX_TOKENS for one in expected) > len(expected) // 2
    if at_once > 1:
        wait_for(lambda: server.metric("preemptions_total") > before, 3, "preemption")


# -- clients that leave, servers that end ------------------------------------------------------------


def busy(server: Served) -> float:
    return (
        server.metric("requests_running")
        + server.metric("requests_waiting")
        + server.metric("kv_blocks_used")
    )


def hang_up_after_three_chunks(url: str, body: dict) -> None:
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data:"))
        assert len([next(lines) for _ in range(3)]) == 3


def hang_up_before_the_answer(url: str, body: dict) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=0.5)


@pytest.mark.parametrize("leave", [hang_up_after_three_chunks, hang_up_before_the_answer])
def test_a_client_that_hangs_up_costs_nothing_more(server, leave):
    wait_for(lambda: busy(server) == 0, 10, "quiet")
    before = server.metric("tokens_total")
    leave(
        f"{server.url}/v1/completions",
        {"model": "m", "prompt": [9] * 40, "max_tokens": 1500, "ignore_eos": True},
    )
    # What /metrics shows is up to a heartbeat old.
    wait_for(lambda: busy(server) == 0, at_most(2.1), "return of all blocks")
    assert server.metric("tokens_total") - before < 1500


class Streams:
    """Streams that run in the background of an event loop."""

    def __init__(self, server: Served, count: int, max_tokens: int) -> None:
        self.server = server
        self.texts = [""] * count
        self.max_tokens = max_tokens

    async def run(self, index: int, http: httpx.AsyncClient) -> None:
        body = {
            "model": "m", "prompt": [9 + index] * 20, "max_tokens": self.max_tokens, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with http.stream("POST", f"{self.server.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for text in answer.aiter_text():
                self.texts[index] += text


async def stop_under_load(server: Served, streams: Streams, *, twice: bool = False) -> int:
    """SIGTERM once every stream runs; the status of a request that comes later."""
    async with asyncio.timeout(120), httpx.AsyncClient(timeout=100) as http:
        tasks = [asyncio.create_task(streams.run(i, http)) for i in range(len(streams.texts))]
        while not all(t.count("data:") > 2 for t in streams.texts):
            await asyncio.sleep(0.02)
        server.terminate()
        await asyncio.sleep(0.3)
        late = await http.post(f"{server.url}/v1/completions", json={"model": "m", "prompt": "x"})
        if twice:
            server.terminate()
        ends = await asyncio.gather(*tasks, return_exceptions=twice)
        assert all(e is None or isinstance(e, httpx.TransportError) for e in ends)
    return late.status_code


def test_a_server_that_is_told_to_stop_finishes_what_runs(checkpoint, tmp_path):
    """Prefill and decode apart, two frontends at one port; then the same port at once, and no patience.

    What the experts had to do is written at the end.
    """
    port, load = free_port(), ("--dump-expert-load", str(tmp_path / "load.npz"))
    with Served(
        tmp_path / "one", checkpoint, SPLIT, port=port, options=load, frontends=2, grace_s=60.0
    ) as server:
        wait_for(lambda: server.log.read_text().count(" ready ") == 2, 60, "second frontend")
        too_long = {"model": "m", "prompt": "x", "max_tokens": 100_000}
        refused = httpx.post(f"{server.url}/v1/completions", json=too_long)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert server.metric("frontend_up") == 2
        scored = {"model": "m", "prompt": [9] * 40, "echo": True, "logprobs": 1, "stream": True}
        for max_tokens in (0, 2):
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json={**scored, "max_tokens": max_tokens}
            ) as answer:
                lines = [text for text in answer.iter_lines() if text.startswith("data: {")]
            echoed = json.loads(lines[0].removeprefix("data: "))["choices"][0]
            assert len(echoed["logprobs"]["token_logprobs"]) == 40
            assert json.loads(lines[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        streams = Streams(server, 8, max_tokens=150)
        assert asyncio.run(stop_under_load(server, streams)) == 503
        assert server.process.wait(20) == 0
        assert left_running(server.folder) == []
        log = server.log.read_text()
    for text in streams.texts:
        assert text.endswith("data: [DONE]\n\n")
        assert '"completion_tokens":150' in text
    assert "Traceback" not in log
    for name in ("prefill", "decode"):
        with np.load(tmp_path / f"load.{name}.npz") as data:
            pairs_L = data["load"].sum(axis=1)
            assert pairs_L.min() == pairs_L.max() > 0
    with Served(tmp_path / "two", checkpoint, ROOMY, port=port, log="json") as server:
        streams = Streams(server, 8, max_tokens=1500)
        assert asyncio.run(stop_under_load(server, streams, twice=True)) == 503
        assert server.process.wait(5) == 128 + signal.SIGTERM
        wait_for(lambda: not left_running(server.folder), 5, "end of all processes")
        log = server.log.read_text()
    assert not any("[DONE]" in text for text in streams.texts)
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert {"ready", "drain", "request", "launch"} <= set(events), "every process writes JSON"
    assert "Traceback" not in log


def test_a_port_that_is_taken_is_an_error_before_anything_starts(server, checkpoint, tmp_path):
    port = int(server.url.rpartition(":")[2])
    plan = write_plan(tmp_path / "plan.yaml", checkpoint, ROOMY, server={"port": port})
    done = moe("serve", plan, "--set", "server.frontends=2")
    assert done.code == 2
    assert f"server.port: 127.0.0.1:{port}: Address already in use" in done.err


def test_a_killed_server_leaves_nothing_behind(server):
    """The last test of this server."""
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not left_running(server.folder), 5, "end of all processes")
