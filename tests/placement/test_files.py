"""Placement files: our own there and back, other engines' read, every defect named with its place."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from moe_runtime.placement.errors import PlacementFileError
from moe_runtime.placement.files import read_counts, read_placement, to_json
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.placement.topology import Topology

# A sample of the kind other engines ship: 72 experts in 80 slots on 8 ranks, layer i starts at expert i.
LAYERS = range(1, 4)


def sample():
    return {layer: [*range(layer, 72), *range(layer + 8)] for layer in LAYERS}


def write(path: Path, data) -> Path:
    path.write_text(yaml.safe_dump({"initial_global_assignments": data}))
    return path


def read(path, **kwargs):
    return read_placement(path, **{"num_experts": 72, "num_ranks": 8, "layers": LAYERS, **kwargs})


def test_the_yaml_of_other_engines_loads(tmp_path):
    placement = read(write(tmp_path / "p.yaml", sample()))
    assert placement.slot_to_expert_LS.tolist() == [sample()[layer] for layer in LAYERS]
    bare = tmp_path / "bare.yaml"
    bare.write_text(yaml.safe_dump(sample()))
    assert read_placement(bare, num_ranks=8).digest == placement.digest


def defect(name):
    data, kwargs = sample(), {}
    if name == "length":
        data[2] = data[2][:-1]
    elif name == "missing expert":
        data[2] = [0 if e == 71 else e for e in data[2]]
    elif name == "unknown expert":
        data[3][5] = 72
    elif name == "unknown layer":
        data[999] = data[1]
    elif name == "missing layer":
        del data[2]
    elif name == "indivisible":
        kwargs["num_ranks"] = 7
    elif name == "twins":
        data[1][0], data[1][79] = 2, 1  # expert 2 is in slots 0 and 1 of rank 0, and in 73
    return data, kwargs


DEFECTS = {
    "length": "layer 2: 79 slots, layer 1 has 80",
    "missing expert": "layer 2: expert 71 is in none of the 80 slots",
    "unknown expert": r"layer 3, position 5: expert 72 does not exist, ids are 0\.\.71",
    "unknown layer": r"layer 999 is not a MoE layer of the model \(1\.\.3\)",
    "missing layer": "layer 2 is missing",
    "indivisible": "80 slots do not divide over 7 ranks; 84 would",
    "twins": "layer 0: expert 2 sits twice on rank 0",
}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_has_its_own_message_with_file_and_place(name, tmp_path):
    data, kwargs = defect(name)
    path = write(tmp_path / "static.yaml", data)
    with pytest.raises(PlacementFileError, match=DEFECTS[name]) as caught:
        read(path, **kwargs)
    assert str(path) in str(caught.value)
    assert sum(bool(re.search(m, str(caught.value))) for m in DEFECTS.values()) == 1


def test_our_own_json_comes_back_the_same(tmp_path):
    base = linear(num_layers=2, num_experts=6, num_ranks=2, redundant_experts=2)
    cumulative = np.zeros((2, 8), np.uint16)
    cumulative[:, 6:] = 40000
    placement = Placement(
        slot_to_expert_LS=base.slot_to_expert_LS,
        num_experts=6,
        num_ranks=2,
        epoch=7,
        cumulative_LS=cumulative,
        topology=Topology(nodes=1, ranks_per_node=2),
    )
    path = tmp_path / "p.json"
    path.write_text(to_json(placement))
    back = read_placement(path, num_experts=6, num_ranks=2)
    assert back.digest == placement.digest
    assert (back.topology, back.epoch) == (placement.topology, 7)
    assert (back.share_LS == placement.share_LS).all()
    path.write_text(to_json(base))
    assert read_placement(path).digest == base.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; 1 is understood"),
        ({"num_experts": None}, "num_experts = None is not a number"),
        ({"epoch": 10**30}, "epoch = 1000000000000000000000000000000 is not a number"),
        ({"slot_to_expert": [[0, 1], [0, 1, 2]]}, "layer 1: 3 slots, layer 0 has 2"),
        ({"slot_to_expert": [[0, "a"]]}, "layer 0, position 1: 'a' is not an expert id"),
        ({"slot_to_expert": []}, "no layers"),
        ({"slot_to_expert": [[1, 0, 2, 3, 4, 5, 0, 1]] * 2}, "the file was changed"),
        ({"cumulative": [[0] * 8]}, "split weights have shape"),
        ({"cumulative": [[-1] * 8] * 2}, "damaged"),
        ({"topology": {"nodes": 3, "ranks_per_node": 1, "seconds_per_byte": [0, 0, 0]}}, "not of 2 ranks"),
        ({"topology": {"nodes": 3}}, "damaged"),
    ],
)
def test_damage_to_our_own_files_is_named(change, message, tmp_path):
    path = tmp_path / "p.json"
    data = json.loads(to_json(linear(num_layers=2, num_experts=6, num_ranks=2, redundant_experts=2)))
    path.write_text(json.dumps({**data, **change}))
    with pytest.raises(PlacementFileError, match=message) as caught:
        read_placement(path)
    assert str(path) in str(caught.value)


def test_numbers_that_disagree_with_the_file_are_refused(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(to_json(linear(num_layers=1, num_experts=6, num_ranks=2)))
    with pytest.raises(PlacementFileError, match="num_ranks = 2, but 4 is needed"):
        read_placement(path, num_ranks=4)


@pytest.mark.parametrize("kind", ["json", "torch"])
def test_a_physical_to_logical_map_loads_from_json_and_torch(kind, tmp_path):
    table = [[0, 1, 2, 0], [2, 1, 0, 2]]
    path = tmp_path / "map"
    if kind == "json":
        path.write_text(json.dumps({"physical_to_logical_map": table}))
    else:
        torch.save({"physical_to_logical_map": torch.tensor(table)}, path)
    assert read_placement(path, num_ranks=2).slot_to_expert_LS.tolist() == table
    with pytest.raises(PlacementFileError, match="give a topology"):
        read_placement(path)


@pytest.mark.parametrize("kind", ["json", "torch"])
def test_a_logical_count_is_a_load_not_a_placement(kind, tmp_path):
    windows = [[[1, 2], [3, 4]], [[10, 20], [30, 40]]]
    path = tmp_path / "count"
    if kind == "json":
        path.write_text(json.dumps({"logical_count": windows}))
    else:
        torch.save({"logical_count": torch.tensor(windows)}, path)
    assert read_counts(path).tolist() == [[11, 22], [33, 44]]
    with pytest.raises(PlacementFileError, match="holds loads"):
        read_placement(path, num_ranks=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{ not json", ":1:3: not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"a: [1, 2\nb: }", ":2: not YAML"),
        (b"0: [%b]" % (b"9" * 5000), "not YAML"),
        (b"1: [0, 1]\n3: [0, 1]\n1: [1, 0]", ":1: not YAML: 1 appears twice"),
        (b"\xff\xfe\x00", "neither text nor a torch file"),
        (b"PK\x03\x04 damaged", "not a torch file"),
        (b"just words", "no placement"),
        (b"{}", "no placement"),
        (b"first: [0, 1]", "layer 'first' is not a number"),
        (b"1: 7", "layer 1: not a list"),
        (b'{"physical_to_logical_map": 3}', "is not a table"),
    ],
)
def test_files_that_are_no_placement(content, message, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(PlacementFileError, match=message):
        read_placement(path, num_ranks=2)


def test_a_pickled_object_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    path = tmp_path / "trap.pt"
    torch.save({"physical_to_logical_map": Trap()}, path)
    with pytest.raises(PlacementFileError, match="not a torch file of plain tensors"):
        read_placement(path, num_ranks=2)
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(PlacementFileError, match="cannot be read: No such file"):
        read_placement(tmp_path / "none.json")


def test_round_robin_slots_hold_the_experts_the_map_says():
    """The loader asks the placement, so a layout that is not linear cannot be filled in linear order."""
    placement = Placement(
        slot_to_expert_LS=np.array([[0, 2, 4, 6, 1, 3, 5, 7]], np.int32), num_experts=8, num_ranks=2
    )
    assert placement.local_experts(0, 0).tolist() == [0, 2, 4, 6]
    assert placement.local_experts(0, 1).tolist() == [1, 3, 5, 7]
    start, slots = placement.replicas
    for expert in range(8):
        slot = slots[0, start[0, expert]]
        assert placement.local_experts(0, slot // 4)[slot % 4] == expert
