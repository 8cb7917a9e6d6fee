"""Gate: what every request passes first: its id, its key, the size of its body; and its line in the log.

Plain ASGI around the application. Knows paths and headers, nothing of what is asked.
"""

import hmac
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.server.logs import Log
from moe_runtime.frontend.server.spans import recorder

# Anybody may ask these: for probes, scrapers and people without a key.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})
ADMIN = "/admin/"
_ID = re.compile(rb"[!-~]{1,128}")


class Gate:
    """`keys`: what clients authenticate with; none: everybody may. Without `admin_keys` /admin/ is closed."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        admin_keys: Sequence[str],
        max_body_bytes: int,
        log: Log,
    ) -> None:
        self._app = app
        self._keys, self._admin_keys = tuple(keys), tuple(admin_keys)
        self._max_body = max_body_bytes
        self._log = log
        self._record = recorder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(8)}".encode()
        note: dict[str, Any] = {
            "request_id": request_id.decode(),
            "method": scope["method"],
            "path": scope["path"],
            "status": None,
        }
        scope["state"] = {**scope.get("state", {}), "note": note}
        start, start_ns = time.monotonic(), time.time_ns()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            error = self._refusal(scope["path"], headers)
            if error is not None:
                note["error"] = error.message
                await send_error(error, send_with_id)
            else:
                # The server leaves the body out of what answers a HEAD.
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                await self._app({**scope, "method": method}, self._limited(receive), send_with_id)
        finally:
            note["ms"] = round(1e3 * (time.monotonic() - start), 1)
            if scope["path"] not in OPEN_PATHS:
                self._record(headers, note, start_ns, time.time_ns())
            if scope["path"] not in OPEN_PATHS or note["status"] in (None, 500):
                self._log("request", note)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            return self._too_large()
        if path in OPEN_PATHS:
            return None
        if (error := _unread(headers)) is not None:
            return error
        if path.startswith(ADMIN):
            if not self._admin_keys:
                return ApiError(403, "no admin key is set: nobody may use /admin/", code="admin_disabled")
            return self._unauthorized(headers, self._admin_keys)
        return self._unauthorized(headers, self._keys) if self._keys else None

    def _unauthorized(self, headers: dict[bytes, bytes], keys: Sequence[str]) -> ApiError | None:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        known = [hmac.compare_digest(key.strip(), k.encode()) for k in keys]
        if scheme.lower() == b"bearer" and any(known):
            return None
        return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _limited(self, receive: Receive) -> Receive:
        """Counts a body whose length was not announced."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._max_body:
                    raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is over {self._max_body} bytes", code="body_too_large")


def _unread(headers: dict[bytes, bytes]) -> ApiError | None:
    """The error for a body that would not arrive as what it is."""
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
    if encoding != "identity":
        message = f"content-encoding: a body in {encoding} is not read here; send it as it is"
        return ApiError(400, message, param="content-encoding")
    if b"upgrade" in headers and (
        headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    ):
        message = "upgrade: this server speaks HTTP/1.1 only, and a body cannot come with an offer to upgrade"
        return ApiError(400, message, param="upgrade")
    return None


async def send_error(error: ApiError, send: Send) -> None:
    """A whole answer that is an error."""
    body = error.body
    headers = [(k.encode(), v.encode()) for k, v in error.headers.items()]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
