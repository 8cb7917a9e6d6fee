"""Sends answers: whole ones, and streams of server-sent events. Ends requests whose client has gone.

Plain ASGI, so that a chunk costs one `send` and nothing else.
"""

import asyncio
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_runtime.frontend.openai.choices import Choice, News
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.openai.forms import Form, error_event
from moe_runtime.frontend.server.service import Running

Log = MutableMapping[str, Any]
CLIENT_GONE = 499
LONG_SCORES = 1024  # prompt tokens with logprobs whose JSON is made in a thread
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Reply(Response):
    """The answer to one request, written while it comes if `stream`. `log` learns how it went."""

    media_type = "application/json"

    def __init__(self, running: Running, form: Form, *, stream: bool, log: Log) -> None:
        super().__init__()
        self._running = running
        self._form = form
        self._stream = stream
        self._log = log
        scored = [c for c in running.choices if c.live.request.sampling.prompt_logprobs >= 0]
        self._long = sum(len(c.live.request.prompt) for c in scored) > LONG_SCORES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(self._watch(receive))
        try:
            if self._stream:
                await self._send_stream(gone, send)
            else:
                await self._send_whole(gone, send)
        finally:
            gone.cancel()
            self._running.close()
            self._note()

    async def _watch(self, receive: Receive) -> None:
        """Ends when the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._running.event.set()

    async def _next(self) -> list[tuple[Choice, News]]:
        running = self._running
        await running.event.wait()
        running.event.clear()
        return running.news()

    async def _send_stream(self, gone: "asyncio.Task[None]", send: Send) -> None:
        running, form = self._running, self._form
        news: list[tuple[Choice, News]] = []
        while not (news or running.ended or gone.done()):
            news = await self._next()
        if running.failure is not None and running.first_token is None and not gone.done():
            await self._send_error(running.failure, send)  # nothing was sent: a status of its own is due
            return
        await _begin(send, 200, _EVENTS)
        body = form.opening(running.choices)
        while not gone.done():
            # With the first tokens come the prompts'.
            long = self._long and any(not piece.first for _, piece in news)
            body += await asyncio.to_thread(self._chunks, news) if long else self._chunks(news)
            if running.ended:
                failure = running.failure
                body += form.closing(running.choices) if failure is None else error_event(failure)
                await send({"type": "http.response.body", "body": body, "more_body": False})
                return
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            body, news = b"", await self._next()
        self._log["status"] = CLIENT_GONE

    async def _send_whole(self, gone: "asyncio.Task[None]", send: Send) -> None:
        running = self._running
        parts: dict[int, list[News]] = {}
        while not (running.ended or gone.done()):
            for choice, news in await self._next():
                parts.setdefault(choice.index, []).append(news)
        if gone.done():
            self._log["status"] = CLIENT_GONE
        elif running.failure is not None:
            await self._send_error(running.failure, send)
        else:
            outputs = [(c, _whole(parts[c.index])) for c in running.choices]
            make = self._form.body
            body = await asyncio.to_thread(make, outputs) if self._long else make(outputs)
            await _begin(send, 200, [(b"content-type", b"application/json"), _length(body)])
            await send({"type": "http.response.body", "body": body, "more_body": False})

    def _chunks(self, news: Sequence[tuple[Choice, News]]) -> bytes:
        return b"".join(self._form.chunk(choice, piece) for choice, piece in news)

    async def _send_error(self, error: ApiError, send: Send) -> None:
        body = error.body
        headers = [(k.encode(), v.encode()) for k, v in error.headers.items()]
        await _begin(send, error.status, [*headers, _length(body)])
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _note(self) -> None:
        running, log = self._running, self._log
        log["prompt_tokens"] = sum(len(c.live.request.prompt) for c in running.choices)
        log["cached_tokens"] = sum(c.live.cached_tokens for c in running.choices)
        log["output_tokens"] = sum(c.num_tokens for c in running.choices)
        log["finish"] = ",".join(sorted({c.finish_reason or "error" for c in running.choices}))
        if running.first_token is not None:
            log["ttft_ms"] = round(1e3 * (running.first_token - running.arrived), 1)
        log["serve_ms"] = round(1e3 * (time.monotonic() - running.arrived), 1)
        if running.failure is not None:
            log["error"] = running.failure.message


def _whole(parts: list[News]) -> News:
    text = "".join(p.text for p in parts)
    return News(text, parts[0].first, parts[-1].last, parts[-1].finish_reason)


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()


async def _begin(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
