"""load_rank: fill a rank's parameters from a checkpoint, reading only what the rank needs.

Owns coverage (every parameter row is assigned exactly once, nothing stays NaN) and the conversion
of dtypes; knows no family, no model class and no other rank.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.checkpoint.safetensors_file import TensorEntry
from moe_runtime.errors import CheckpointError
from moe_runtime.spec.weights import TensorTarget

SCRATCH_BYTES = 16 << 20
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What loading a rank took. Metadata of the checkpoint are counted by the Checkpoint.

    bytes_needed           bytes of the tensors this rank needs, as stored: shared and own experts
    bytes_read             bytes of tensors read
    expert_bytes_resident  bytes of the parameters with a slot axis, empty slots included
    seconds                wall time
    """

    bytes_needed: int
    bytes_read: int
    expert_bytes_resident: int
    seconds: float


def load_rank(
    checkpoint: Checkpoint,
    targets: Sequence[TensorTarget],
    parameters: Mapping[str, Tensor],
    local_experts: Callable[[int], NDArray[np.int32]],
    wanted: Callable[[], bool] = lambda: True,
) -> LoadReport:
    """Fill `parameters` (allocated by the caller, on any device). LOCAL.

    `local_experts(moe_layer)` is int32 [slots_per_rank]: the experts of this rank's slots, -1 for a
    slot that stays zero. An expert in several slots is read once. The checkpoint must have passed
    `validate`. Raises CheckpointError naming the tensor if it cannot be read or its values are NaN
    or infinite, and naming the parameter if a row of it is assigned twice or never; also once the weights
    are not `wanted` any more.
    """
    started, read_before = time.perf_counter(), checkpoint.bytes_read
    local = {name: parameter.detach() for name, parameter in parameters.items()}
    for parameter in local.values():
        parameter.fill_(torch.nan)
    expert_parameters = {t.parameter: t.moe_layer for t in targets if t.moe_layer is not None}
    slots = {layer: _slots_of(local_experts(layer)) for layer in set(expert_parameters.values())}
    loader = _Loader(checkpoint, local)
    needed = 0
    for target in targets:
        if not wanted():
            raise CheckpointError(f"{checkpoint.path}: no longer wanted")
        places = _places(target, slots)
        if places != []:
            needed += loader.load(target, places)
    for name, layer in expert_parameters.items():
        loader.clear(name, slots[layer].get(-1, []))
    loader.check()
    return LoadReport(
        bytes_needed=needed,
        bytes_read=checkpoint.bytes_read - read_before,
        expert_bytes_resident=sum(local[name].nbytes for name in expert_parameters),
        seconds=time.perf_counter() - started,
    )


def _slots_of(experts: NDArray[np.int32]) -> dict[int, list[int]]:
    """expert -> the local slots it sits in; -1 -> the empty ones."""
    slots: dict[int, list[int]] = {}
    for slot, expert in enumerate(experts.tolist()):
        slots.setdefault(expert, []).append(slot)
    return slots


def _places(target: TensorTarget, slots: Mapping[int, Mapping[int, list[int]]]) -> list[int] | None:
    """None for a weight every rank holds, else the local slots of its expert (perhaps none)."""
    if target.moe_layer is None or target.expert is None:
        return None
    return slots[target.moe_layer].get(target.expert, [])


class _Loader:
    """State of one load: the parameters, which of their rows are assigned, and by which tensor."""

    def __init__(self, checkpoint: Checkpoint, parameters: Mapping[str, Tensor]) -> None:
        self._checkpoint = checkpoint
        self._parameters = parameters
        self._scratch = bytearray()
        # Per parameter, times assigned, over its rows (over [slot, row] of one with a slot axis).
        self._assigned: dict[str, NDArray[np.int8]] = {}
        self._loaded: list[tuple[str, Tensor]] = []

    def load(self, target: TensorTarget, slots: Sequence[int] | None) -> int:
        """Read a tensor into its rows; with `slots`, into the first of them, then copy to the others.

        Returns the bytes it takes as stored.
        """
        if target.parameter not in self._parameters:
            raise CheckpointError(f"tensor {target.source}: the model has no parameter {target.parameter}")
        parameter = self._parameters[target.parameter]
        marks = self._marks(target.parameter, axes=1 if slots is None else 2)
        if slots is None:
            rows = [self._claim(target, parameter, marks)]
        else:
            rows = [self._claim(target, parameter[slot], marks[slot]) for slot in slots]
        self._read(target, rows[0])
        for copy in rows[1:]:
            copy.copy_(rows[0])
        self._loaded.append((target.source, rows[0]))
        return rows[0].numel() * self._checkpoint.entries[target.source].itemsize

    def clear(self, name: str, slots: Sequence[int]) -> None:
        """Zero the slots of a parameter that hold no expert."""
        for slot in slots:
            self._parameters[name][slot].zero_()
            self._marks(name, axes=2)[slot] += 1

    def _marks(self, name: str, *, axes: int) -> NDArray[np.int8]:
        if name not in self._assigned:
            self._assigned[name] = np.zeros(tuple(self._parameters[name].shape[:axes]), np.int8)
        return self._assigned[name]

    def _claim(self, target: TensorTarget, parameter: Tensor, marks: NDArray[np.int8]) -> Tensor:
        """The rows of `parameter` (or of one slot of it) that `target` fills, marked as assigned."""
        shape = target.used_shape
        start, stop = target.row_start, target.row_start + shape[0]
        rows = parameter[start:stop]
        where = f"rows {start}:{stop} of parameter {target.parameter}"
        if tuple(rows.shape) != shape:
            shapes = f"{list(shape)} does not fit {where} {list(parameter.shape)}"
            raise CheckpointError(f"tensor {target.source}: {shapes}")
        if marks[start:stop].any():
            raise CheckpointError(f"tensor {target.source}: {where} are assigned twice")
        marks[start:stop] += 1
        return rows

    def _read(self, target: TensorTarget, rows: Tensor) -> None:
        """Fill `rows` with the part of the tensor that is used."""
        entry = self._checkpoint.entries[target.source]
        axis, start, _ = target.part or (0, 0, 0)
        row_bytes = entry.nbytes // entry.shape[0]
        if axis == 0:
            self._read_run(entry, start * row_bytes, rows)
            return
        for n, row in enumerate(rows):
            self._read_run(entry, n * row_bytes + start * entry.itemsize, row)

    def _read_run(self, entry: TensorEntry, offset: int, rows: Tensor) -> None:
        """Fill `rows` straight from the file, or through a bounded scratch buffer if it must convert.

        They are stored one after the other from byte `offset` of the tensor on.
        """
        source = _TORCH_DTYPES[entry.dtype]
        if rows.dtype == source and rows.device.type == "cpu" and rows.is_contiguous():
            # Viewed as bytes, since numpy has no bfloat16.
            self._checkpoint.read_into(entry, rows.view(torch.uint8).numpy().reshape(-1).data, offset)
            return
        row_bytes = rows[0].numel() * entry.itemsize
        step = min(rows.shape[0], max(1, SCRATCH_BYTES // row_bytes))
        if len(self._scratch) < step * row_bytes:
            self._scratch = bytearray(step * row_bytes)
        for first in range(0, rows.shape[0], step):
            part = rows[first : first + step]
            buffer = memoryview(self._scratch)[: part.shape[0] * row_bytes]
            self._checkpoint.read_into(entry, buffer, offset + first * row_bytes)
            part.copy_(torch.frombuffer(buffer, dtype=source).view(part.shape))

    def check(self) -> None:
        """Every row of every parameter was assigned, and what was assigned is finite."""
        for name, parameter in self._parameters.items():
            marks = self._assigned.get(name, np.zeros(1, np.int8))
            if not marks.all():
                row = np.argwhere(marks == 0)[0].tolist()
                raise CheckpointError(
                    f"parameter {name} {list(parameter.shape)}: row {row} was never assigned"
                )
        # A sum is NaN or infinite if any of its terms is, and needs no mask of the parameter's size.
        # (A finite parameter whose sum overflows gets the exact test too, and passes it.)
        if all(bool(torch.isfinite(p.sum(dtype=torch.float32))) for p in self._parameters.values()):
            return
        for source, rows in self._loaded:
            bad = int((~torch.isfinite(rows)).sum())
            if bad:
                file = self._checkpoint.entries[source].file
                problem = f"{bad} of its values are NaN or infinite in {rows.dtype}"
                raise CheckpointError(f"{file}: tensor {source}: {problem}")
