"""Frontends as children of rank 0."""

import signal
import subprocess
import sys

from moe_runtime.launch.frontends import _no_sigterm

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
