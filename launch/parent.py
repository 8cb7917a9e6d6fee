"""A process that outlives its parent holds memory and ports for nobody: end it.

Launchers that are killed leave their ranks alive (torchrun and mpirun both), so every rank
watches its parent itself.
"""

import os
import signal
import threading
from collections.abc import Callable

from moe_runtime.launch.environment import PARENT
from moe_runtime.shared_memory import ProcessWatch


class ParentWatch:
    """A thread that ends this process when its parent is gone, after `last_act`.

    Our own launcher tells its pid, since it may be gone before this process comes to look.
    """

    def __init__(self, last_act: Callable[[], object] = lambda: None) -> None:
        self.last_act = last_act
        parent = int(os.environ.get(PARENT, os.getppid()))
        threading.Thread(target=self._watch, args=(parent,), name="parent-watch", daemon=True).start()

    def _watch(self, parent: int) -> None:
        """Sleep until the parent has ended: an idle rank must cost nothing."""
        if os.getppid() == parent:
            ProcessWatch(parent).wait()
        try:
            self.last_act()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
