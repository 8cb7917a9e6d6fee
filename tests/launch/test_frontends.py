"""Frontends as children of rank 0."""

import signal
import socket
import subprocess
import sys

import pytest

from moe_runtime.errors import InputError
from moe_runtime.launch.frontends import Frontends, _no_sigterm, listen
from moe_runtime.plan.effective import EffectiveServer

# As a frontend does: a while until it listens for signals, then it hears of those that came.
CHILD = """
import asyncio, signal, sys
from moe_runtime.frontend.server import lifecycle
print("started", flush=True)
sys.stdin.readline()

class Heard(Exception):
    pass

class Ending:
    def ask(self):
        print("asked", flush=True)
        raise SystemExit(0)

class Log:
    pass

def stop(*_):
    raise Heard

lifecycle._send_logging_to = stop  # what follows once signals are listened for

async def main():
    try:
        await lifecycle.run_server(None, None, service=None, ranks=None, ending=Ending(), grace=0, log=Log())
    except Heard:
        await asyncio.sleep(30)

asyncio.run(main())
"""


SERVING = """
import signal, sys, time
heard = 0

def handle(*_):
    global heard
    heard += 1
    if heard == int(sys.argv[1]):
        sys.exit(7)

signal.signal(signal.SIGTERM, handle)
print("listening", flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize(("serving", "ends_at", "code"), [(True, 2, 7), (True, 9, -9), (False, 1, -9)])
def test_a_frontend_that_serves_may_tell_its_clients_before_it_is_killed(monkeypatch, serving, ends_at, code):
    monkeypatch.setattr("moe_runtime.launch.frontends.LAST_WORDS_SECONDS", 10.0 if code == 7 else 0.3)
    with subprocess.Popen([sys.executable, "-c", SERVING, str(ends_at)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"listening\n"
        frontends = Frontends(lambda code: None)
        frontends._processes, frontends._serving = [child], serving
        frontends.kill()
        assert child.returncode == code


def server(**changes) -> EffectiveServer:
    values = {
        "host": "127.0.0.1", "port": 8000, "frontends": 1, "served_name": "", "max_body_bytes": 1,
        "max_choices": 1, "timeout_s": 1.0, "grace_s": 1.0, "log": "plain",
    }  # fmt: skip
    return EffectiveServer(**{**values, **changes})


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("x" * 70, "server.host: x+:8000: not the name of a host"),
        ("256.1.1.1", "server.host: 256.1.1.1:8000: "),
        ("192.0.2.1", "server.port: 192.0.2.1:8000: Cannot assign"),
    ],
)
def test_a_host_that_cannot_be_listened_on_is_named(host, message):
    with pytest.raises(InputError, match=message):
        listen(server(host=host))


def test_a_port_that_is_taken_is_named_with_a_way_out():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"{port}: .* in use; --set server\.port=N takes another"):
            listen(server(port=port))


def test_a_signal_that_comes_before_a_frontend_listens_is_heard_once_it_does():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with _no_sigterm():
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    with child:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate("go\n", timeout=60)
    assert (out, child.returncode) == ("asked\n", 0)
