"""Expert loads from files: CSV, JSON, npz, or another engine's `logical_count`. Every mistake has its place.

CSV   a row per MoE layer, a column per expert, `#` begins a comment line
JSON  `[[...], ...]` or `{"load": [[...], ...]}`, or `logical_count` [layers, experts] or windows of it
npz   an array called `load`, or the only one; npy: the array. Three axes are windows, which are summed.
"""

import csv
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.loads import check_load
from moe_runtime.placement.errors import PlacementFileError
from moe_runtime.placement.files import COUNT_KEY, read_counts


class LoadFileError(BalanceError):
    """A load file cannot be read or is no table of loads; the message names file, line and column."""


def read_load(path: Path) -> NDArray[np.float64]:
    """float64 [L, E], by the file's ending: .csv, .json, .npz, .npy, .pt. Raises LoadFileError."""
    readers = {".csv": _csv, ".json": _json, ".npz": _numpy, ".npy": _numpy, ".pt": _counts}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise LoadFileError(f"{path}: the ending must be one of {', '.join(readers)}")
    try:
        table = reader(path)
    except OSError as error:
        raise LoadFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return check_load(table)
    except BalanceError as error:
        raise LoadFileError(f"{path}: {error}") from error


def _csv(path: Path) -> Any:
    rows: list[list[float]] = []
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        for number, cells in enumerate(csv.reader(file), start=1):
            if not cells or cells[0].lstrip().startswith("#"):
                continue
            row = []
            for column, cell in enumerate(cells, start=1):
                try:
                    row.append(float(cell))
                except ValueError as error:
                    raise LoadFileError(
                        f"{path}:{number}: column {column}: {cell!r} is not a number"
                    ) from error
            if rows and len(row) != len(rows[0]):
                raise LoadFileError(
                    f"{path}:{number}: {len(row)} columns, the rows before have {len(rows[0])}"
                )
            rows.append(row)
    if not rows:
        raise LoadFileError(f"{path}: no rows of numbers")
    return rows


def _json(path: Path) -> Any:
    try:
        data = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise LoadFileError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise LoadFileError(f"{path}: not text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; too many brackets
        raise LoadFileError(f"{path}: not JSON: {error}") from error
    if isinstance(data, dict):
        if COUNT_KEY in data:
            return _counts(path)
        if "load" not in data:
            raise LoadFileError(f"{path}: has neither load nor {COUNT_KEY}")
        data = data["load"]
    if not isinstance(data, list) or not data or not all(isinstance(row, list) for row in data):
        raise LoadFileError(f"{path}: not a list of rows, one per layer")
    for layer, row in enumerate(data):
        if len(row) != len(data[0]):
            raise LoadFileError(f"{path}: layer {layer}: {len(row)} loads, layer 0 has {len(data[0])}")
        for expert, value in enumerate(row):
            if type(value) not in (int, float):
                raise LoadFileError(f"{path}: layer {layer}, expert {expert}: {value!r} is not a number")
    return data


def _numpy(path: Path) -> Any:
    try:
        table = _array(path, np.load(path, allow_pickle=False))
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, LoadFileError):
            raise
        raise LoadFileError(f"{path}: not a numpy file of numbers: {error}") from error
    if table.dtype.kind not in "buif":
        raise LoadFileError(f"{path}: not a numpy file of numbers: it holds {table.dtype}")
    return table.sum(axis=0) if table.ndim == 3 else table


def _array(path: Path, data: Any) -> Any:
    """The array of an npy file, or the one that is meant in an npz file."""
    if isinstance(data, np.lib.npyio.NpzFile):
        with data:
            names = data.files
            if "load" not in names and len(names) != 1:
                raise LoadFileError(f"{path}: holds {', '.join(names) or 'nothing'}; one must be called load")
            return data["load" if "load" in names else names[0]]
    return data


def _counts(path: Path) -> Any:
    try:
        return read_counts(path)
    except PlacementFileError as error:
        raise LoadFileError(str(error)) from error
