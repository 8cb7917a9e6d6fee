"""The folder in which the sockets of a launch lie: private to this user, short enough for the kernel."""

import os
import shutil
import tempfile
from pathlib import Path

from moe_runtime.engine.sockets import ipc_address

LONGEST_TMPDIR = 50


def make_session() -> Path:
    """A new folder that only this user can enter."""
    # Socket paths are short by the kernel's rule; a long TMPDIR has no room for one.
    long = len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR
    return Path(tempfile.mkdtemp(prefix="moe-runtime-", dir="/tmp" if long else None))


def remove_session(session: Path | str | None) -> None:
    """Remove the folder and its sockets, if there is one; whoever of a launch is last does."""
    if session is not None:
        shutil.rmtree(session, ignore_errors=True)


def inbox_address(session: Path, instance: str, rank: int) -> str:
    """Where a rank of an instance listens."""
    return ipc_address(session, f"{instance}.{rank}")
