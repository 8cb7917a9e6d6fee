"""The frontends of a launch, children of rank 0: started, told of signals, watched, reaped.

A frontend that fails ends the launch. Frontends that serve share a port: rank 0 binds it before any
weights are read, so that a port that is taken is an error at once.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import msgspec

from moe_runtime.engine.sockets import ipc_address
from moe_runtime.errors import InputError
from moe_runtime.frontend.bootstrap import Bootstrap, RankAddress
from moe_runtime.launch import environment
from moe_runtime.launch.console import say
from moe_runtime.launch.preflight import Preflight
from moe_runtime.launch.sockets import inbox_address
from moe_runtime.plan.effective import EffectiveServer

EXIT_SECONDS = 60.0
LAST_WORDS_SECONDS = 1.0
SIGNAL_SECONDS = 0.1  # between two signals, which would be one if they met


class Frontends:
    """`on_failure` is called with the exit code of a frontend that failed, from another thread."""

    def __init__(self, on_failure: Callable[[int], None]) -> None:
        self._on_failure = on_failure
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._serving = False

    def start(
        self, flight: Preflight, session: Path, argv: Sequence[str], listeners: Sequence[socket.socket] = ()
    ) -> None:
        """Run the command line `argv` once more per listener, or once; each gets its listener."""
        ranks = rank_addresses(flight, session)
        count = max(1, len(listeners))
        self._serving = bool(listeners)
        addresses = [ipc_address(session, f"frontend.{number}") for number in range(count)]
        for number, address in enumerate(addresses):
            bootstrap = Bootstrap(
                frontend=number, frontends=count, address=address, ranks=ranks, peers=addresses
            )
            env = dict(os.environ)
            env[environment.PARENT] = str(os.getpid())
            env[environment.FRONTEND] = msgspec.json.encode(bootstrap).decode()
            own = listeners[number : number + 1]
            if own:
                env[environment.SERVE_FD] = str(own[0].fileno())
            with _no_sigterm() if own else nullcontext():
                process = subprocess.Popen(
                    [sys.executable, "-m", "moe_runtime", *argv],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[s.fileno() for s in own],
                    # A launcher signals the whole session of a rank; those that serve hear of it from rank 0.
                    start_new_session=bool(own),
                )
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(process,), name="frontend-watch", daemon=True).start()
        for listener in listeners:
            listener.close()

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def wait(self) -> int:
        """The first exit code that is not 0, once all have ended."""
        codes = [p.wait(EXIT_SECONDS) for p in self._processes]
        return next((c for c in codes if c), 0)

    def kill(self) -> None:
        """End those that still run; those that serve have a moment to tell their clients."""
        self._closing = True
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        for _ in range(2 if self._serving else 0):  # the second signal means now
            self.signal(signal.SIGTERM)
            self._wait(min(deadline, time.monotonic() + SIGNAL_SECONDS))
        self._wait(deadline if self._serving else 0.0)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _wait(self, deadline: float) -> None:
        """Until all have ended, at most until then."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if code == 0:
            return
        time.sleep(0.5)  # if the whole launch is being stopped, that is the reason
        if self._closing:
            return
        if code < 0:
            say(f"the frontend was killed by {signal.Signals(-code).name}")
            code = 128 - code
        self._on_failure(code)


@contextmanager
def _no_sigterm() -> Generator[None]:
    """What is started meanwhile hears of SIGTERM once it knows how to end in order, and lifts this itself."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def rank_addresses(flight: Preflight, session: Path) -> list[RankAddress]:
    """Where all ranks listen: known before any of them does."""
    return [
        RankAddress(
            instance=i.name,
            deployment=d.name,
            rank=rank,
            address=inbox_address(session, i.name, rank),
            kv_tokens=d.kv_cache.blocks * d.kv_cache.block_tokens,
            max_sequences=d.scheduler.max_sequences,
        )
        for i in flight.effective.instances
        for d in [flight.effective.deployment(i.deployment)]
        for rank in range(len(i.ranks))
    ]


def listen(server: EffectiveServer) -> list[socket.socket]:
    """A bound socket per frontend, all at the plan's port; InputError if it cannot be had.

    Nobody else can be at the port: the first socket is bound alone before it is shared.
    """
    alone = _bound(server, share=False)
    if server.frontends == 1:
        return [alone]
    alone.close()
    return [_bound(server, share=True) for _ in range(server.frontends)]


def _bound(server: EffectiveServer, *, share: bool) -> socket.socket:
    where = f"{server.host}:{server.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
    except OSError as error:
        raise InputError(f"server.host: {where}: {error.strerror}") from None
    except UnicodeError:  # of names that are too long, or have nothing between two dots
        raise InputError(f"server.host: {where}: not the name of a host") from None
    # Connections of a server that has just ended do not keep the next one from the port.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        hint = "; --set server.port=N takes another" if error.errno == errno.EADDRINUSE else ""
        raise InputError(f"server.port: {where}: {error.strerror}{hint}") from None
    return bound
