"""Lines for the person at the terminal: progress and errors on stderr, results on stdout.

Where programs read the log, what is said becomes a line of JSON, a traceback too.
"""

import os
import sys

from moe_runtime.frontend.server.logs import Log
from moe_runtime.launch import environment


def say(text: str) -> None:
    """Something to read, on stderr."""
    if os.environ.get(environment.LOG) == "json":
        Log("json", write, {})("launch", {"message": text.rstrip("\n")})
    else:
        write(text.rstrip("\n"))


def write(line: str) -> None:
    """A line on stderr as it is."""
    if sys.stderr is None:  # closed by who started us
        return
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """A result on stdout."""
    if sys.stdout is None:
        return
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
