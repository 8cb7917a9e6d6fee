"""RUN.json on disk: written whole or not at all, read strictly."""

from pathlib import Path

import msgspec

from moe_runtime.errors import InputError
from moe_runtime.files import write_atomically
from moe_runtime.report.schema import SCHEMA_VERSION, Report


class _Head(msgspec.Struct, frozen=True):
    schema_version: int


def save_report(path: Path, report: Report) -> None:
    """Write a report as indented JSON; InputError if the file cannot be written."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def load_report(path: Path) -> Report:
    """Read a report; InputError naming the file and field if it is not one, or of another schema version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(data, type=_Head).schema_version
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: not a report of moe-runtime: {error}") from error
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version is {version}, this version of moe-runtime reads {SCHEMA_VERSION}"
        )
    try:
        return msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: not a valid report: {error}") from error
