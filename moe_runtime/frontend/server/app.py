"""The application: which path does what.

Owns routes, status codes of errors, and the OpenAPI description. Reads bodies itself, so that every
complaint about one has OpenAI's form.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from moe_runtime.frontend.openai.chat import ChatRequest
from moe_runtime.frontend.openai.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.openai.schema import SamplingFields, parse
from moe_runtime.frontend.peers import Peers
from moe_runtime.frontend.server.openapi import ANSWERS, describe
from moe_runtime.frontend.server.prepare import (
    Prepared,
    ServedModel,
    check_model,
    prepare_chat,
    prepare_completion,
)
from moe_runtime.frontend.server.reply import CLIENT_GONE, Reply
from moe_runtime.frontend.server.service import Service, Terms
from moe_runtime.frontend.server.status_page import render_status

_LONG_BODY = 16 << 10  # bytes of a request that is prepared in a thread
RANK_HEADER, TIMEOUT_HEADER = "x-rank", "x-request-timeout"


class Json(Response):
    """An answer of JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def make_app(
    model: ServedModel,
    service: Service,
    *,
    advice: Callable[[], Mapping[str, Any]],
    start_drain: Callable[[], None],
    peers: Peers,
) -> FastAPI:
    """`advice` is what /admin/advice answers; `start_drain` begins the end of this frontend.

    What is asked about all frontends, or has to reach all of them, goes by way of `peers`.
    """
    app = FastAPI(title="moe-runtime", docs_url=None, redoc_url=None)
    endpoints = _Endpoints(model, service, peers)
    for path, handler, body in (
        ("/v1/completions", endpoints.completions, CompletionRequest),
        ("/v1/chat/completions", endpoints.chat, ChatRequest),
        ("/tokenize", endpoints.tokenize, TokenizeRequest),
        ("/detokenize", endpoints.detokenize, DetokenizeRequest),
    ):
        app.post(path, openapi_extra=describe(body, model.name), responses=ANSWERS)(handler)
    app.get("/v1/models")(endpoints.models)
    app.get("/v1/models/{name:path}", responses=ANSWERS)(endpoints.model)
    app.get("/health", responses=ANSWERS)(endpoints.health)
    app.get("/ready", responses=ANSWERS)(endpoints.ready)
    app.get("/metrics")(endpoints.metrics)
    app.get("/", response_class=HTMLResponse)(endpoints.status_page)
    _add_admin(app, service, peers, advice, start_drain)
    _add_error_handlers(app)
    return app


class _Endpoints:
    def __init__(self, model: ServedModel, service: Service, peers: Peers) -> None:
        self._model = model
        self._service = service
        self._peers = peers
        peers.on("metrics", lambda _: service.metrics.export())

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        body = await request.body()
        parsed = parse(CompletionRequest, body)
        return await self._serve(request, parsed, len(body), lambda: prepare_completion(self._model, parsed))

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        body = await request.body()
        parsed = parse(ChatRequest, body)
        return await self._serve(request, parsed, len(body), lambda: prepare_chat(self._model, parsed))

    async def _serve(
        self, request: Request, parsed: SamplingFields, size: int, prepare: Callable[[], Prepared]
    ) -> Response:
        terms = _terms(request, parsed, self._service.timeout)
        self._service.require_hope(terms)  # before its prompt is made into tokens
        prepared = await asyncio.to_thread(prepare) if size > _LONG_BODY else prepare()
        running = self._service.start(prepared.orders, terms)
        note = request.state.note
        note["user"] = parsed.user
        return Reply(running, prepared.form, stream=bool(parsed.stream), log=note)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, as /v1/completions reads a prompt."""
        parsed = parse(TokenizeRequest, await request.body())
        check_model(self._model, parsed.model)
        ids = await asyncio.to_thread(self._model.tokenizer.encode, parsed.prompt)
        return Json({"tokens": ids, "count": len(ids), "max_model_len": self._model.limits.longest})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        parsed = parse(DetokenizeRequest, await request.body())
        check_model(self._model, parsed.model)
        size = self._model.limits.vocab_size
        if any(i >= size for i in parsed.tokens):
            raise ApiError(400, f"tokens: the vocabulary ends at {size - 1}", param="tokens")
        return Json({"prompt": await asyncio.to_thread(self._model.tokenizer.decode, parsed.tokens)})

    async def models(self) -> Response:
        """The one model that is served."""
        return Json({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """A model by its name."""
        check_model(self._model, name)
        return Json(self._card())

    def _card(self) -> dict[str, Any]:
        m = self._model
        return {
            "id": m.name,
            "object": "model",
            "created": m.created,
            "owned_by": "moe-runtime",
            "max_model_len": m.limits.longest,
        }

    async def health(self) -> Response:
        """Liveness: this frontend answers, and every rank that was ready has reported lately."""
        silent = self._service.silent(time.monotonic())
        return Json({"status": "silent" if silent else "ok", "silent": silent}, 503 if silent else 200)

    async def ready(self) -> Response:
        """Readiness: every rank is ready, and the server is not shutting down."""
        missing, draining = self._service.not_ready(), self._service.admission.draining
        status = "draining" if draining else "starting" if missing else "ready"
        return Json({"status": status, "not_ready": missing}, 200 if status == "ready" else 503)

    async def metrics(self) -> Response:
        """Prometheus' text form, of all frontends."""
        metrics = self._service.metrics
        text = metrics.render(await self._peers.ask("metrics"))
        return Response(text, headers={"content-type": metrics.content_type})

    async def status_page(self) -> HTMLResponse:
        """For people."""
        return HTMLResponse(render_status(self._model.name, self._service, time.monotonic()))


def _terms(request: Request, parsed: SamplingFields, longest: float) -> Terms:
    """How a request wants to be served; ApiError 400 for a header that says nothing useful.

    `longest`: seconds that any request may take.
    """
    timeout = rank = None
    if (text := request.headers.get(TIMEOUT_HEADER)) is not None:
        try:
            timeout = float(text)
        except ValueError:
            timeout = math.nan
        if not 0 < timeout <= longest:
            message = f"{TIMEOUT_HEADER}: must be a number of seconds above 0, at most {longest:g}"
            raise ApiError(400, message, param=TIMEOUT_HEADER)
    if (text := request.headers.get(RANK_HEADER)) is not None:
        if not (text.isascii() and text.isdigit() and len(text) < 7):
            raise ApiError(400, f"{RANK_HEADER}: must be the number of a rank", param=RANK_HEADER)
        rank = int(text)
    return Terms(
        name=request.state.note["request_id"],
        priority=parsed.priority or 0,
        cache_salt=parsed.cache_salt or "",
        timeout=timeout,
        rank=rank,
    )


def _add_admin(
    app: FastAPI,
    service: Service,
    peers: Peers,
    advice: Callable[[], Mapping[str, Any]],
    start_drain: Callable[[], None],
) -> None:
    @app.get("/admin/advice", responses=ANSWERS)
    async def get_advice() -> Response:
        """How many replicas the load asks for, and the signals that say so."""
        return Json(advice())

    @app.post("/admin/abort/{request_id}", responses=ANSWERS)
    async def abort(request_id: str) -> Response:
        """End the requests with this X-Request-Id, whichever frontend has them."""
        ended = sum(map(int, (await peers.ask("abort", request_id)).values()))
        if not ended:
            raise ApiError(404, f"no running request has the id {request_id!r}", code="request_not_found")
        return Json({"aborted": ended})

    @app.post("/admin/drain", responses=ANSWERS)
    async def drain() -> Response:
        """Refuse new requests, let running ones finish, then exit; what SIGTERM does."""
        running = sum(map(int, (await peers.ask("drain")).values()))
        return Json({"status": "draining", "running": running})

    def drain_this(_: str) -> bytes:
        start_drain()
        return b"%d" % service.num_requests

    peers.on("abort", lambda name: b"%d" % service.abort(name))
    peers.on("drain", drain_this)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request.state.note["error"] = error.message
        return Response(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def misspelled(request: Request, error: Exception) -> Response:
        """A part of the path or the query that cannot be."""
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return await refused(
            request, ApiError(400, f"{param}: {first['msg']}", param=param, code="invalid_value")
        )

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        api_error = ApiError(error.status_code, f"{where}: {error.detail}", code="no_such_endpoint")
        return Response(api_error.body, error.status_code, {**(error.headers or {}), **api_error.headers})

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return Response(*_internal())


def _internal() -> tuple[bytes, int, dict[str, str]]:
    error = ApiError(500, "internal error; the server's log has its traceback", code="internal_error")
    return error.body, error.status, error.headers
