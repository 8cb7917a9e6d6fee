"""A process that outlives its parent holds memory and ports for nobody: end it.

Launchers that are killed leave their ranks alive (torchrun and mpirun both), so every rank
watches its parent itself.
"""

import os
import signal
import threading
import time

CHECK_SECONDS = 0.5


def watch_parent() -> None:
    """Start a thread that ends this process, and its children's sessions, when the parent is gone."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
