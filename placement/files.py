"""Placements in files: our own JSON, and the files other engines write.

Owns formats and the messages about what is wrong with a file; the invariants are `Placement`'s. Every
problem is a PlacementFileError that names the file, and the layer and position where there is one.

Read besides our own JSON:
  mapping     `physical_to_logical_map` [layers, slots], JSON or a torch file
  counts      `logical_count` [layers, experts], or windows of it: a load, not a placement (`read_counts`)
  per layer   YAML, under `initial_global_assignments` or bare: `layer: [expert of each slot]`
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.errors import PlacementError, PlacementFileError, TopologyError
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.topology import Topology

FORMAT = "moe-runtime placement"
VERSION = 1
MAP_KEY = "physical_to_logical_map"
COUNT_KEY = "logical_count"
YAML_KEY = "initial_global_assignments"


def to_json(placement: Placement) -> str:
    """The placement as JSON text; `read_placement` gives it back with the same digest."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "num_experts": placement.num_experts,
        "num_ranks": placement.num_ranks,
        "epoch": placement.epoch,
        "digest": placement.digest,
        "topology": None if placement.topology is None else placement.topology.to_json(),
        "slot_to_expert": placement.slot_to_expert_LS.tolist(),
    }
    if placement.cumulative_LS is not None:
        data["cumulative"] = placement.cumulative_LS.tolist()
    lines = ",\n".join(f"{json.dumps(k)}: {_rows(v)}" for k, v in data.items())
    return "{\n" + lines + "\n}\n"


def _rows(value: Any) -> str:
    """Tables a layer a line, so that files can be compared by eye."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in value) + "\n]"
    return json.dumps(value)


def read_placement(
    path: Path,
    *,
    num_experts: int | None = None,
    num_ranks: int | None = None,
    layers: Iterable[int] | None = None,
) -> Placement:
    """A placement from any of the formats above, told apart by what is in the file.

    Formats of other engines say neither ranks nor layers: `num_ranks` is needed for them, `num_experts`
    is the largest id + 1 unless given, and `layers` are the model's MoE layer numbers that a YAML file
    must have, each once and no other (default: those it has, in order). A given number must agree with
    the file. Raises PlacementFileError.
    """
    data = _load(path)
    if isinstance(data, Mapping) and data.get("format") == FORMAT:
        placement = _own(path, data)
        for name, want in (("num_experts", num_experts), ("num_ranks", num_ranks)):
            if want is not None and getattr(placement, name) != want:
                raise PlacementFileError(f"{path}: {name} = {getattr(placement, name)}, but {want} is needed")
        return placement
    names, rows = _foreign_rows(path, data, layers)
    if num_ranks is None:
        raise PlacementFileError(f"{path}: the file does not say how many ranks there are; give a topology")
    table = _table(path, names, rows, num_experts)
    E = int(table.max()) + 1 if num_experts is None else num_experts
    _check_rows(path, names, table, E, num_ranks)
    try:
        return Placement(slot_to_expert_LS=table, num_experts=E, num_ranks=num_ranks)
    except PlacementError as error:
        raise PlacementFileError(f"{path}: {error}") from error


def read_counts(path: Path) -> NDArray[np.float64]:
    """float64 [L, E]: the load in a file with `logical_count`, windows of it summed."""
    data = _load(path)
    if not isinstance(data, Mapping) or COUNT_KEY not in data:
        raise PlacementFileError(f"{path}: has no {COUNT_KEY}")
    try:
        counts = np.asarray(_plain(data[COUNT_KEY]), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlacementFileError(f"{path}: {COUNT_KEY} is not a table of numbers: {error}") from error
    if counts.ndim == 3:
        counts = counts.sum(axis=0)
    if counts.ndim != 2:
        raise PlacementFileError(
            f"{path}: {COUNT_KEY} has shape {counts.shape}; [layers, experts] or [windows, layers, experts]"
        )
    return counts


def _load(path: Path) -> Any:
    """The file's data: JSON, YAML or a torch file, by its beginning."""
    try:
        head = path.read_bytes()
    except OSError as error:
        raise PlacementFileError(f"{path}: cannot be read: {error.strerror}") from error
    if head[:2] == b"PK" or head[:1] == b"\x80":
        return _load_torch(path)
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        raise PlacementFileError(f"{path}: neither text nor a torch file (byte {error.start})") from error
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise PlacementFileError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; too many brackets
            raise PlacementFileError(f"{path}: not JSON: {error}") from error
    return _load_yaml(path, text)


def _load_torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise PlacementFileError(f"{path}: a torch file, and torch is not installed") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # no pickled code
    except Exception as error:  # noqa: BLE001  torch raises whatever the damaged bytes lead to
        raise PlacementFileError(f"{path}: not a torch file of plain tensors: {error}") from error


def _load_yaml(path: Path, text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A layer that is given twice would silently be the last one."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            twice = next((n for n in names if names.count(n) > 1), None)
            if twice is not None:
                raise yaml.MarkedYAMLError(problem=f"{twice} appears twice", problem_mark=node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506, a safe loader
    except (ValueError, RecursionError) as error:
        raise PlacementFileError(f"{path}: not YAML: {error}") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where is not None else ""
        raise PlacementFileError(f"{path}{line}: not YAML: {getattr(error, 'problem', error)}") from error


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _own(path: Path, data: Mapping[str, Any]) -> Placement:
    if data.get("version") != VERSION:
        raise PlacementFileError(f"{path}: version {data.get('version')!r}; {VERSION} is understood")
    missing = sorted({"num_experts", "num_ranks", "epoch", "slot_to_expert"} - set(data))
    if missing:
        raise PlacementFileError(f"{path}: {', '.join(missing)} missing")
    for name in ("num_experts", "num_ranks", "epoch"):
        if type(data[name]) is not int or not (name != "epoch") <= data[name] < 2**31:
            raise PlacementFileError(f"{path}: {name} = {data[name]!r} is not a number of them")
    rows = data["slot_to_expert"]
    names = list(range(len(rows))) if isinstance(rows, list) else []
    table = _table(path, names, rows, data["num_experts"])
    cumulative = data.get("cumulative")
    try:
        topology = None if data.get("topology") is None else Topology.from_json(data["topology"])
        placement = Placement(
            slot_to_expert_LS=table,
            num_experts=data["num_experts"],
            num_ranks=data["num_ranks"],
            epoch=data["epoch"],
            cumulative_LS=None if cumulative is None else np.array(cumulative, dtype=np.uint16),
            topology=topology,
        )
    except (PlacementError, TopologyError) as error:
        raise PlacementFileError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PlacementFileError(f"{path}: split weights or topology are damaged: {error!r}") from error
    if "digest" in data and data["digest"] != placement.digest:
        raise PlacementFileError(
            f"{path}: the digest is {data['digest']}, the content's {placement.digest}: the file was changed"
        )
    return placement


def _foreign_rows(path: Path, data: Any, layers: Iterable[int] | None) -> tuple[list[int], list[Any]]:
    """Layer numbers, ascending, and the row of each."""
    if isinstance(data, Mapping) and MAP_KEY in data:
        rows = _plain(data[MAP_KEY])
        if not isinstance(rows, list):
            raise PlacementFileError(f"{path}: {MAP_KEY} is not a table")
        return list(range(len(rows))), rows
    if isinstance(data, Mapping) and COUNT_KEY in data:
        raise PlacementFileError(f"{path}: holds loads ({COUNT_KEY}), not a placement; give it as a load")
    if isinstance(data, Mapping) and isinstance(data.get(YAML_KEY), Mapping):
        data = data[YAML_KEY]
    if not isinstance(data, Mapping) or not data:
        raise PlacementFileError(f"{path}: no placement: expected {MAP_KEY}, or lists of experts by layer")
    for key in data:
        if type(key) is not int and not (isinstance(key, str) and key.isdecimal()):
            raise PlacementFileError(f"{path}: layer {key!r} is not a number")
    by_layer = {int(key): row for key, row in data.items()}
    if len(by_layer) < len(data):
        raise PlacementFileError(f"{path}: a layer appears twice")
    wanted = sorted(by_layer) if layers is None else sorted(layers)
    unknown = sorted(set(by_layer) - set(wanted))
    if unknown:
        raise PlacementFileError(
            f"{path}: layer {unknown[0]} is not a MoE layer of the model ({wanted[0]}..{wanted[-1]})"
        )
    for layer in wanted:
        if layer not in by_layer:
            raise PlacementFileError(f"{path}: layer {layer} is missing")
    return wanted, [by_layer[layer] for layer in wanted]


def _table(path: Path, names: list[int], rows: Any, num_experts: int | None) -> NDArray[np.int32]:
    """int32 [L, S]; every row a list of as many expert ids."""
    if not isinstance(rows, list) or not rows:
        raise PlacementFileError(f"{path}: no layers")
    for name, row in zip(names, rows, strict=True):
        if not isinstance(row, list):
            raise PlacementFileError(f"{path}: layer {name}: not a list of expert ids")
        if len(row) != len(rows[0]):
            raise PlacementFileError(
                f"{path}: layer {name}: {len(row)} slots, layer {names[0]} has {len(rows[0])}"
            )
        for position, expert in enumerate(row):
            if type(expert) is not int:
                raise PlacementFileError(
                    f"{path}: layer {name}, position {position}: {expert!r} is not an expert id"
                )
            if expert < -1 or (num_experts is not None and expert >= num_experts):
                top = "" if num_experts is None else f", ids are 0..{num_experts - 1}"
                raise PlacementFileError(
                    f"{path}: layer {name}, position {position}: expert {expert} does not exist{top}"
                )
    return np.array(rows, dtype=np.int32).reshape(len(rows), -1)


def _check_rows(
    path: Path, names: list[int], table: NDArray[np.int32], num_experts: int, num_ranks: int
) -> None:
    """The invariants in the file's own layer numbers."""
    S = table.shape[1]
    if S % num_ranks:
        raise PlacementFileError(
            f"{path}: {S} slots do not divide over {num_ranks} ranks; {-(-S // num_ranks) * num_ranks} would"
        )
    for name, row in zip(names, table, strict=True):
        missing = np.setdiff1d(np.arange(num_experts), row)
        if len(missing):
            raise PlacementFileError(f"{path}: layer {name}: expert {missing[0]} is in none of the {S} slots")
