"""Checkpoint: the tensors of a checkpoint directory, checked and read by counted preads.

Owns the index, the file descriptors and the count of bytes read; no mmap, no torch, so the parent
process can check a checkpoint before it starts ranks. Knows no family: targets say what is needed.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from moe_runtime.checkpoint.safetensors_file import TensorEntry, read_exactly, read_header
from moe_runtime.errors import CheckpointError
from moe_runtime.models.families.fields import read_json_object
from moe_runtime.spec.weights import TensorTarget

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES = ("F32", "BF16", "F16")


class Checkpoint:
    """An opened checkpoint. LOCAL: every process opens its own; use as a context manager.

    path            the directory
    entries         name -> where the tensor lies
    metadata_bytes  bytes of headers and index read by `open`
    bytes_read      all bytes read so far, metadata included
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self.metadata_bytes = 0
        self.bytes_read = 0
        self._fds: dict[Path, int] = {}

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read index and headers. CheckpointError for any file that is missing or not whole."""
        checkpoint = cls(path)
        try:
            checkpoint._read_metadata()
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read_into(self, entry: TensorEntry, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer` with the tensor's bytes from byte `start` on."""
        try:
            read_exactly(self._fds[entry.file], buffer, entry.offset + start)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{entry.file}: tensor {entry.name}: cannot be read: {error}") from None
        self.bytes_read += len(buffer)

    def validate(self, targets: Sequence[TensorTarget], skipped: Callable[[str], bool]) -> None:
        """Check that exactly the needed tensors are there, with their shapes and float dtypes.

        `skipped(name)` is True for tensors that may be there without being needed. Reads the router
        correction biases, which must be finite. Raises CheckpointError naming file and tensor.
        """
        self._check_dtypes(t.source for t in targets)
        missing = [t.source for t in targets if t.source not in self.entries]
        if missing:
            raise CheckpointError(f"{self.path}: {_counted(missing, 'missing')}")
        self._check_extra({t.source for t in targets}, skipped)
        for target in targets:
            entry = self.entries[target.source]
            if entry.shape != target.shape:
                shapes = f"must be {list(target.shape)}, found {list(entry.shape)}"
                raise CheckpointError(f"{entry.file}: tensor {entry.name}: shape {shapes}")
            if target.fp32:
                self._check_finite(entry)

    def _check_dtypes(self, names: Iterable[str]) -> None:
        for name in names:
            entry = self.entries.get(name)
            if entry is None or entry.dtype in FLOAT_DTYPES:
                continue
            allowed = f"must be {', '.join(FLOAT_DTYPES)}"
            if entry.dtype.startswith("F8"):
                allowed = f"quantised weights are not supported, convert them: the dtype {allowed}"
            raise CheckpointError(f"{entry.file}: tensor {name}: dtype {entry.dtype}: {allowed}")

    def _check_extra(self, needed: set[str], skipped: Callable[[str], bool]) -> None:
        extra = defaultdict(list)
        for name, entry in self.entries.items():
            # Tensors without values say nothing: some writers store them for parts a model lacks.
            if name not in needed and not skipped(name) and entry.nbytes:
                extra[entry.file].append(name)
        for file, names in extra.items():
            raise CheckpointError(f"{file}: {_counted(names, 'not part of the model')}")

    def _check_finite(self, entry: TensorEntry) -> None:
        raw = bytearray(entry.nbytes)
        self.read_into(entry, memoryview(raw))
        bad = np.flatnonzero(~np.isfinite(as_float32(raw, entry.dtype)))
        if len(bad):
            problem = f"{len(bad)} of its values are NaN or infinite, first: [{bad[0]}]"
            raise CheckpointError(f"{entry.file}: tensor {entry.name}: {problem}")

    def _read_metadata(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such checkpoint directory")
        index, single = self.path / INDEX_NAME, self.path / SINGLE_NAME
        if index.exists():
            weight_map = self._read_index(index)
        elif single.exists():
            weight_map = None
        else:
            raise CheckpointError(f"{self.path}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")
        files = [single] if weight_map is None else self._shards(index, weight_map)
        for file in files:
            self._read_shard(file)
        if weight_map is not None:
            self._check_index(index, weight_map)
        self.bytes_read += self.metadata_bytes

    def _read_index(self, index: Path) -> dict[str, str]:
        weight_map = read_json_object(index).get("weight_map")
        self.metadata_bytes += index.stat().st_size
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: field 'weight_map' must map tensor names to files")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{index}: tensor {name}: {file!r} is not a file name")
        return weight_map

    def _shards(self, index: Path, weight_map: dict[str, str]) -> list[Path]:
        """The files the index names; an error with the tensors of those that are not there."""
        for name in dict.fromkeys(weight_map.values()):
            if not (self.path / name).is_file():
                lost = [tensor for tensor, file in weight_map.items() if file == name]
                raise CheckpointError(
                    f"{self.path / name}: file not found, named by {index.name}; {_counted(lost, 'missing')}"
                )
        return [self.path / name for name in sorted(set(weight_map.values()))]

    def _read_shard(self, file: Path) -> None:
        try:
            self._fds[file] = os.open(file, os.O_RDONLY)
            entries, nbytes = read_header(self._fds[file], file)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
        self.metadata_bytes += nbytes
        for entry in entries:
            other = self.entries.setdefault(entry.name, entry)
            if other is not entry:
                raise CheckpointError(f"{file}: tensor {entry.name} is also in {other.file.name}")

    def _check_index(self, index: Path, weight_map: dict[str, str]) -> None:
        lost: dict[str, list[str]] = defaultdict(list)
        for name, file in weight_map.items():
            if name not in self.entries or self.entries[name].file.name != file:
                lost[file].append(name)
        for file, names in lost.items():
            raise CheckpointError(
                f"{index.parent / file}: {_counted(names, f'missing, named by {index.name}')}"
            )
        unnamed = [name for name in self.entries if name not in weight_map]
        if unnamed:
            found_in = self.entries[unnamed[0]].file
            raise CheckpointError(f"{found_in}: {_counted(unnamed, f'not named by {index.name}')}")


def _counted(names: Sequence[str], what: str) -> str:
    """`tensor X is missing`, or `12 tensors are missing, first: X`."""
    if len(names) == 1:
        return f"tensor {names[0]} is {what}"
    return f"{len(names)} tensors are {what}, first: {names[0]}"


def as_float32(raw: bytearray, dtype: str) -> NDArray[np.float32]:
    """The values of a little-endian F32, F16 or BF16 buffer, flat."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)
