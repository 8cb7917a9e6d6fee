"""Lines for the person at the terminal: progress and errors on stderr, results on stdout."""

import sys


def say(text: str) -> None:
    """One line on stderr."""
    if sys.stderr is None:  # closed by who started us
        return
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """A result on stdout."""
    if sys.stdout is None:
        return
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
