"""The life of a server: listen, become ready, drain, end.

Owns signals and the order of the end: new requests are refused, running ones finish or are told that
they cannot, then the sockets close.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.server.logs import Log
from moe_runtime.frontend.server.service import Service

_POLL = 0.02
_CLOSE_SECONDS = 5  # for answers that are written but not sent


class Ending:
    """Whether the server is to end: 0 not, 1 when running requests have finished, 2 now."""

    def __init__(self, service: Service, log: Log) -> None:
        self._service = service
        self._log = log
        self.asked = 0
        self.begun = asyncio.Event()

    def ask(self) -> None:
        """A signal, or an administrator's wish; every one is more urgent than the last."""
        self.asked += 1
        self._service.admission.draining = True
        self.begun.set()
        self._log("drain", {"asked": self.asked, "running": self._service.num_requests})

    def drain(self) -> None:
        """Ask once, however often it is called."""
        if not self.asked:
            self.ask()


class _Server(uvicorn.Server):
    """uvicorn without its own reaction to signals."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def run_server(
    app: ASGIApp,
    listener: socket.socket,
    *,
    service: Service,
    ranks: Awaitable[None],
    ending: Ending,
    grace: float,
    log: Log,
) -> None:
    """Serve until it is asked to end; `ranks` ends, or raises why, when nothing more will come from them."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.ask)
    # A launch keeps it from a frontend until here: one that came earlier is heard now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _send_logging_to(log)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Server(config)
    tasks = {
        "server": asyncio.create_task(server.serve([listener])),
        "ranks": asyncio.ensure_future(ranks),
        "ending": asyncio.create_task(ending.begun.wait()),
        "deadlines": asyncio.create_task(service.watch_deadlines()),
    }
    try:
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        if tasks["ending"].done():
            await finish(service, ending, grace)
        server.should_exit = True
        await tasks["server"]
        for name in ("ranks", "deadlines"):
            if tasks[name].done():
                tasks[name].result()
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def finish(service: Service, ending: Ending, grace: float) -> None:
    """Let running requests finish; those that do not in time are told so."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace
    while service.num_requests and ending.asked < 2 and loop.time() < deadline:
        await asyncio.sleep(_POLL)
    why = "the server was told to stop now" if ending.asked > 1 else f"its grace time of {grace:g} s is over"
    service.fail_all(ApiError(503, f"the server is shutting down and {why}", code="shutting_down"))
    while service.num_requests and loop.time() < deadline + _CLOSE_SECONDS:
        await asyncio.sleep(_POLL)


class _Handler(logging.Handler):
    """What libraries log, in the form of our own lines."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: Mapping[str, Any] = {"logger": record.name, "message": self.format(record)}
        self._log(record.levelname.lower(), fields)


def _send_logging_to(log: Log) -> None:
    root = logging.getLogger()
    root.handlers = [_Handler(log)]
