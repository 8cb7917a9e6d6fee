"""A small HTTP/1.1 client on asyncio streams: one request per connection, bodies as they come.

Owns the protocol and nothing above it; just what a load generator needs, without its own overhead
in the measured times.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from moe_runtime.errors import InputError

_HEAD_BYTES = 64 << 10


class HttpFailure(Exception):
    """No usable answer: the connection failed, or what came was no HTTP."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. `prefix` is what the URL has before every path."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> "Server":
        """InputError for what is no http or https URL of a server."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"{url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError(f"{url!r} is not a URL like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


class Answer:
    """A response whose body has not been read yet."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes; HttpFailure if it ends too early."""
        try:
            if "chunked" in self.headers.get("transfer-encoding", ""):
                while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
            elif (length := self.headers.get("content-length")) is not None:
                yield await self._reader.readexactly(int(length))
            else:
                while piece := await self._reader.read(1 << 16):
                    yield piece
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise HttpFailure(f"the answer broke off: {error}") from error

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[bytes]:
        """The data of server-sent events, as they come."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield event[6:]


@asynccontextmanager
async def request(
    server: Server,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Answer]:
    """Send a request on a connection of its own; HttpFailure if no answer begins."""
    try:
        reader, writer = await asyncio.open_connection(
            server.host,
            server.port,
            ssl=ssl.create_default_context() if server.tls else None,
            limit=_HEAD_BYTES,
        )
    except (OSError, UnicodeError) as error:  # a host's name may be none
        raise HttpFailure(f"cannot connect to {server.host}:{server.port}: {error}") from error
    try:
        writer.write(_head(server, method, path, body, headers or {}) + (body or b""))
        yield await _answer(reader)
    finally:
        writer.close()


def _head(server: Server, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    fields = {"host": f"{server.host}:{server.port}", "connection": "close", **headers}
    if body is not None:
        fields |= {"content-type": "application/json", "content-length": str(len(body))}
    lines = [f"{method} {server.prefix}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _answer(reader: asyncio.StreamReader) -> Answer:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ", 2)[1])
    except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise HttpFailure(f"no HTTP answer: {error}") from error
    pairs = (line.partition(":") for line in head[1:] if line)
    return Answer(status, {k.strip().lower(): v.strip() for k, _, v in pairs}, reader)
