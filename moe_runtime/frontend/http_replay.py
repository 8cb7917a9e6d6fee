"""Open-loop replay against a server: what its clients see, by the clock of this process.

Talks to /v1/completions of any OpenAI-compatible server that streams logprobs: their lists say which
tokens came with an event, even those that made no text yet.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moe_runtime.errors import InputError
from moe_runtime.frontend.http_client import Answer, HttpFailure, Server, request
from moe_runtime.frontend.replay import Arrival
from moe_runtime.report.records import RequestRecord
from moe_runtime.spec.requests import FinishReason

ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Which instance makes the first token, and which the others; None where there are several."""

    prefill: str | None
    decode: str | None


async def served_model(server: Server, key: str | None) -> str:
    """The name of the server's only model. InputError if there is no such server or model."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            async with request(server, "GET", "/v1/models", headers=_authorization(key)) as answer:
                body = await answer.body()
    except HttpFailure as error:
        raise InputError(f"--http: {error}") from error
    except TimeoutError as error:
        raise InputError(f"--http: /v1/models does not answer within {ANSWER_SECONDS:g} s") from error
    shown = body[:200].decode(errors="replace")
    if answer.status != 200:
        raise InputError(f"--http: /v1/models answers {answer.status}: {shown}")
    try:
        names = [str(m["id"]) for m in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError) as error:
        raise InputError(f"--http: /v1/models answers what is no list of models: {shown}") from error
    if len(names) != 1:
        raise InputError(f"--http: the server has {len(names)} models: {', '.join(names)}")
    return names[0]


async def replay_http(
    server: Server,
    arrivals: Sequence[Arrival],
    *,
    model: str,
    instances: Instances,
    key: str | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> list[RequestRecord]:
    """Send all requests at their times, each on a connection of its own; one record each, in order.

    A request that the server refuses (429, 503) is a failed record like any other.
    """
    start = time.monotonic()

    async def one(arrival: Arrival) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
        seen = _Seen(sent=time.monotonic())
        try:
            headers = {**_authorization(key), "accept": "text/event-stream"}
            body = _body(arrival, model)
            async with request(server, "POST", "/v1/completions", body=body, headers=headers) as answer:
                await seen.read(answer)
        except HttpFailure as failure:
            seen.error = str(failure)
        on_done()
        return seen.record(arrival, scheduled=start + arrival.at, instances=instances)

    return await asyncio.gather(*(one(a) for a in arrivals))


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _body(arrival: Arrival, model: str) -> bytes:
    sampling = arrival.sampling
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": arrival.prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


@dataclass(slots=True)
class _Seen:
    """What a client has seen of one answer."""

    sent: float
    token_times: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    counted: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    async def read(self, answer: Answer) -> None:
        if answer.status != 200:
            self.error = f"HTTP {answer.status}: {_message(await answer.body())}"
            return
        async for data in answer.events():
            if data == b"[DONE]":
                return
            self._event(data, time.monotonic())
        self.error = self.error or "the stream ended without [DONE]"

    def _event(self, data: bytes, now: float) -> None:
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise HttpFailure(f"an event that is not JSON: {error}") from error
        if "error" in event:
            self.error = _message(data)
            return
        for choice in event["choices"]:
            tokens = (choice.get("logprobs") or {}).get("tokens") or ()
            self.token_times += [now] * len(tokens)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if (usage := event.get("usage")) is not None:
            self.counted = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def record(self, arrival: Arrival, *, scheduled: float, instances: Instances) -> RequestRecord:
        error = self.error
        if error is None and self.counted != len(self.token_times):
            error = f"the server counted {self.counted} output tokens, {len(self.token_times)} arrived"
        if error is None and self.finish_reason is None:
            error = "the stream ended without a finish reason"
        return RequestRecord(
            index=arrival.index,
            scheduled_arrival=scheduled,
            sent=self.sent,
            token_times=tuple(self.token_times),
            prompt_tokens=len(arrival.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.token_times),
            finish_reason=FinishReason.ERROR if error is not None else str(self.finish_reason),
            error=error,
            prefill_instance=instances.prefill,
            decode_instance=instances.decode,
        )


def _message(body: bytes) -> str:
    """The message of an OpenAI error, or the beginning of whatever came."""
    try:
        error: Any = msgspec.json.decode(body)["error"]
        return str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
