"""Files that are there whole or not at all. Knows nothing of what is in them."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from moe_runtime.errors import InputError


def write_atomically(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path` and rename it over `path`; InputError if that cannot be done.

    A symbolic link stays one: what it points to is replaced. A device or pipe is written to.
    """
    partial: Path | None = None
    try:
        if (
            path.exists() and not path.is_file()
        ):  # by its own name: what /dev/stdout resolves to may have none
            with path.open("wb") as file:
                file.write(data)
            return
        target = path.resolve()
        partial = _beside(target)
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """InputError if `write_atomically(path, ...)` is bound to fail; ask before the work, not after."""
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder, not a file")
        if path.exists() and not path.is_file():
            return
        target = path.resolve()
        folder = target.parent
        if not folder.is_dir():
            raise InputError(f"{path}: the folder {folder} does not exist")
        target.exists()  # says whether the name is one the file system takes
        probe = _beside(target)  # permissions alone do not say what a file system takes: /proc takes nothing
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _beside(target: Path) -> Path:
    """A name in the folder of `target` that nobody has."""
    return target.with_name(f".{secrets.token_hex(8)}.partial")


def make_folder(path: Path) -> None:
    """A folder that files can be written to, made with its parents if need be. InputError if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{path}: is a file, not a folder") from error
    except OSError as error:
        raise InputError(f"{path}: the folder cannot be made: {error.strerror}") from error
    require_writable(path / "file")


def require_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path]) -> None:
    """InputError unless every output can be written and none is an input or another output.

    Keys are what the user calls them, such as `--out`; outputs that are None were not asked for.
    """
    taken = {path.resolve(): name for name, path in inputs.items()}
    for name, path in outputs.items():
        if path is None:
            continue
        require_writable(path)
        target = path.resolve()
        other = taken.get(target)
        if other is not None and not (path.exists() and not path.is_file()):
            raise InputError(f"{name} {path}: is the same file as {other}")
        taken[target] = name


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file; InputError for anything else, since it is read more than once."""
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: must be a regular file: it is read more than once")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
