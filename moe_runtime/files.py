"""Files that are there whole or not at all. Knows nothing of what is in them."""

import os
import secrets
from pathlib import Path

from moe_runtime.errors import InputError


def write_atomically(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path` and rename it over `path`; InputError if that cannot be done."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """InputError if `write_atomically(path, ...)` is bound to fail; ask before the work, not after."""
    folder = path.parent
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not a file")
    if not folder.is_dir():
        raise InputError(f"{path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: the folder {folder} cannot be written to")
