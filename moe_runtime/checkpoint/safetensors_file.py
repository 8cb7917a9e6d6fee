"""The header of one safetensors file, read with plain preads and checked against the file's size.

Owns the format's rules: u64 header length, JSON header, then one byte range per tensor that
together fill the rest of the file without gaps or overlaps. Knows no model and no torch.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies: `nbytes` bytes at `offset` of `file`; `dtype` as the format spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return ITEM_BYTES[self.dtype]


def read_exactly(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` (bytes) from `offset` of a file. EOFError if the file ends before."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise EOFError(f"the file ends before it, at byte {offset + done}")
        done += count


def read_header(fd: int, file: Path) -> tuple[list[TensorEntry], int]:
    """The entries of a file in the order of their data, and the bytes read.

    Raises CheckpointError naming the file (and tensor) for anything that is not whole.
    """
    size = os.fstat(fd).st_size
    if size < _LENGTH_BYTES:
        raise CheckpointError(f"{file}: truncated: {size} bytes cannot hold a safetensors header")
    prefix = bytearray(_LENGTH_BYTES)
    read_exactly(fd, memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > min(size - _LENGTH_BYTES, _MAX_HEADER):
        raise CheckpointError(
            f"{file}: truncated or not safetensors: header of {length} bytes in a file of {size}"
        )
    raw = bytearray(length)
    read_exactly(fd, memoryview(raw), _LENGTH_BYTES)
    start = _LENGTH_BYTES + length
    entries = [_entry(file, name, value, start) for name, value in _parse(file, raw).items()]
    entries.sort(key=lambda e: (e.offset, e.nbytes))
    _check_extents(file, entries, start, size)
    return entries, start


def _parse(file: Path, raw: bytearray) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in out if names.count(name) > 1)
            raise CheckpointError(f"{file}: {twice!r} appears twice in the header")
        return out

    try:
        header = json.loads(bytes(raw).decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise CheckpointError(f"{file}: the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header must be a JSON object, found {type(header).__name__}")
    header.pop("__metadata__", None)
    return header


def _entry(file: Path, name: str, value: Any, start: int) -> TensorEntry:
    def bad(problem: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name}: {problem}")

    def sizes(key: str) -> tuple[int, ...]:
        found = value.get(key)
        if not isinstance(found, list) or not all(type(n) is int and n >= 0 for n in found):
            raise bad(f"{key} must be a list of sizes, found {found!r}")
        return tuple(found)

    if not isinstance(value, dict):
        raise bad("its header entry is not an object")
    dtype, shape, offsets = value.get("dtype"), sizes("shape"), sizes("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise bad(f"unknown dtype {dtype!r}")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise bad(f"data_offsets must be [begin, end], found {list(offsets)}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise bad(f"{dtype} {list(shape)} takes {nbytes} bytes, data_offsets span {offsets[1] - offsets[0]}")
    return TensorEntry(
        name=name, dtype=dtype, shape=shape, file=file, offset=start + offsets[0], nbytes=nbytes
    )


def _check_extents(file: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    """Byte ranges follow each other from the header to the end of the file."""
    end, previous = start, "the header"
    for entry in entries:
        if entry.offset < end:
            raise CheckpointError(f"{file}: tensor {entry.name}: its data overlap those of {previous}")
        if entry.offset > end:
            gap = entry.offset - end
            raise CheckpointError(
                f"{file}: tensor {entry.name}: misaligned, {gap} bytes after {previous} belong to none"
            )
        end, previous = entry.offset + entry.nbytes, entry.name
        if end > size:
            raise CheckpointError(
                f"{file}: truncated: tensor {entry.name} ends at byte {end}, the file at {size}"
            )
    if end < size:
        raise CheckpointError(f"{file}: {size - end} bytes after the last tensor belong to none")
