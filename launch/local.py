"""The built-in launcher: starts the ranks of this host, watches them, and reaps every one.

The first rank that fails ends all of them, once the others had a moment to say what they saw. Ranks
lead sessions of their own, so that what they started dies with them; they watch this process, so
that they die with it too.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from moe_runtime.launch import environment
from moe_runtime.launch.console import say
from moe_runtime.launch.sockets import make_session, remove_session

POLL_SECONDS = 0.05
AGAIN_SECONDS, GRACE_SECONDS = 0.3, 3.0
WITNESS_SECONDS = 1.5  # after a rank's failure, for the others to say whom they waited for
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(argv: Sequence[str], num_ranks: int, *, serve: bool = False) -> int:
    """Run `python -m moe_runtime ARGV` as `num_ranks` ranks; the exit code is the first failure's, or 0.

    With `serve` the first interrupt goes to rank 0, which lets running requests finish; the second
    stops all.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    interrupt = _finish_first(ranks) if serve else _raise_interrupt
    previous = {s: signal.signal(s, interrupt) for s in INTERRUPTS}
    session = make_session()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.set_inheritable(True)
            for rank in range(num_ranks):
                ranks.append(_start(argv, rank, num_ranks, listener, session))
        return _supervise(ranks)
    except KeyboardInterrupt as interrupt:
        say("interrupted: stopping all ranks")
        return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)
    finally:
        _end_all(ranks)
        remove_session(session)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _finish_first(
    ranks: "Sequence[subprocess.Popen[bytes]]",
) -> Callable[[int, FrameType | None], None]:
    """A handler of interrupts that passes the first on to rank 0, and is itself the answer to the second."""
    told = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told or not ranks:
            raise KeyboardInterrupt(number)
        told = True
        say("interrupted: running requests finish, new ones are refused; once more stops all at once")
        with suppress(ProcessLookupError):
            os.kill(ranks[0].pid, signal.SIGTERM)

    return handle


def _start(
    argv: Sequence[str], rank: int, num_ranks: int, listener: socket.socket, session: Path
) -> "subprocess.Popen[bytes]":
    env = dict(os.environ)
    env[environment.RANK] = str(rank)
    env[environment.WORLD] = str(num_ranks)
    env[environment.PORT] = str(listener.getsockname()[1])
    env[environment.PARENT] = str(os.getpid())
    env[environment.SESSION] = str(session)
    # When the store's host falls, torch would print a stack trace of C++ for each rank that is left.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    fds = []
    if rank == 0:
        # Rank 0 hosts the store on a socket that listens already: no port can be lost in between.
        env[environment.LISTEN_FD] = str(listener.fileno())
        fds = [listener.fileno()]
    command = [sys.executable, "-m", "moe_runtime", *argv]
    return subprocess.Popen(command, env=env, pass_fds=fds, start_new_session=True, stdin=subprocess.DEVNULL)


def _supervise(ranks: "list[subprocess.Popen[bytes]]") -> int:
    running = dict(enumerate(ranks))
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            if code < 0:
                say(f"rank {rank} was killed by {signal.Signals(-code).name}")
                code = 128 - code
            elif code - 128 in (signal.SIGTERM, signal.SIGHUP):
                say(f"rank {rank} was ended by {signal.Signals(code - 128).name}")
            if code > 0:
                _wait(list(running.values()), WITNESS_SECONDS)
                return code
        time.sleep(POLL_SECONDS)
    return 0


def _wait(ranks: "list[subprocess.Popen[bytes]]", seconds: float) -> None:
    """Until all have ended, at most so long."""
    deadline = time.monotonic() + seconds
    while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _end_all(ranks: "list[subprocess.Popen[bytes]]") -> None:
    """SIGTERM, then SIGKILL, to every rank's session; returns when all are reaped.

    SIGTERM twice, since rank 0 of a server takes the first one as a wish to let requests finish.

    Another interrupt meanwhile kills at once.
    """
    for interrupt in INTERRUPTS:
        signal.signal(interrupt, lambda number, frame: _signal_all(ranks, signal.SIGKILL))
    for number, seconds in (
        (signal.SIGTERM, AGAIN_SECONDS),
        (signal.SIGTERM, GRACE_SECONDS),
        (signal.SIGKILL, GRACE_SECONDS),
    ):
        _signal_all(ranks, number)
        _wait(ranks, seconds)


def _signal_all(ranks: "list[subprocess.Popen[bytes]]", number: signal.Signals) -> None:
    for process in ranks:
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            continue  # all of the session has ended
