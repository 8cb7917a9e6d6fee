"""Load files and the report of the command, and the command itself."""

import json
import re
import sys

import numpy as np
import pytest
import torch

from moe_runtime.eplb.load_files import LoadFileError, read_load
from moe_runtime.eplb.report import PlotUnavailable, layer_table, plot_rank_loads, summary
from moe_runtime.eplb.solve import solve
from moe_runtime.launch.cli import run
from moe_runtime.placement.files import read_placement, to_json
from moe_runtime.placement.placement import linear
from moe_runtime.placement.topology import Topology

LOAD = [[4.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 5.0]]


def save(folder, name, data=LOAD):
    path = folder / name
    if name.endswith(".csv"):
        path.write_text("# a comment\n" + "\n".join(",".join(map(str, row)) for row in data) + "\n")
    elif name.endswith(".json"):
        path.write_text(json.dumps(data))
    elif name.endswith(".npz"):
        np.savez(path, load=np.array(data), other=np.zeros(2))
    elif name.endswith(".npy"):
        np.save(path, np.array(data))
    else:
        torch.save({"logical_count": torch.tensor(data)}, path)
    return path


@pytest.mark.parametrize("name", ["l.csv", "l.json", "l.npz", "l.npy", "l.pt"])
def test_loads_are_read_from_every_format(name, tmp_path):
    assert read_load(save(tmp_path, name)).tolist() == LOAD


def test_other_shapes_of_the_formats(tmp_path):
    assert read_load(save(tmp_path, "a.json", {"load": LOAD})).tolist() == LOAD
    assert read_load(save(tmp_path, "b.json", {"logical_count": [LOAD, LOAD]}))[0, 0] == 8.0
    assert read_load(save(tmp_path, "c.npy", [LOAD, LOAD]))[0, 0] == 8.0
    np.savez(tmp_path / "one.npz", counts=np.array(LOAD))
    assert read_load(tmp_path / "one.npz").tolist() == LOAD


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"1,2\n3,x\n", r"a.csv:2: column 2: 'x' is not a number"),
        ("a.csv", b"1,2\n3\n", r"a.csv:2: 1 columns, the rows before have 2"),
        ("a.csv", b"# nothing\n", "no rows"),
        ("a.csv", b"1,-2\n", "layer 0: the load of expert 1 is negative"),
        ("a.csv", b"1,nan\n", "layer 0: the load of expert 1 is NaN"),
        ("a.json", b"[[1,2],[3]]", "layer 1: 1 loads, layer 0 has 2"),
        ("a.json", b"[[1,true]]", "layer 0, expert 1: True is not a number"),
        ("a.json", b"{}", "has neither load nor logical_count"),
        ("a.json", b"[1, 2]", "not a list of rows"),
        ("a.json", b"[[1,", "a.json:1:5: not JSON"),
        ("a.json", b"\xff", "not text"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.json", b"[[%b, 1]]" % (b"9" * 5000), "not JSON"),
        ("a.json", b"[[%b, 1]]" % (b"9" * 400), "loads are not numbers"),
        ("a.csv", b"1,1e301\n", r"a load is 1e\+301; 1e\+300 is the largest"),
        ("a.npz", b"no archive", "not a numpy file"),
        ("a.pt", b"PK nothing", "not a torch file"),
        ("a.txt", b"1,2", "the ending must be one of .csv"),
    ],
)
def test_files_that_are_no_load_say_where(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(LoadFileError, match=message) as caught:
        read_load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [(np.ones((2, 2), complex), "it holds complex128"), (np.ones((0, 4)), r"shape \(0, 4\)")],
)
def test_arrays_that_are_no_loads_are_refused(array, message, tmp_path):
    np.save(tmp_path / "l.npy", array)
    with pytest.raises(LoadFileError, match=message):
        read_load(tmp_path / "l.npy")


def test_what_a_spreadsheet_puts_first_is_no_number(tmp_path):
    (tmp_path / "l.csv").write_bytes(b"\xef\xbb\xbf1,2\r\n3,4\r\n")
    assert read_load(tmp_path / "l.csv").tolist() == [[1, 2], [3, 4]]


def test_pickled_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "p.npz", load=np.array([{}], dtype=object))
    with pytest.raises(LoadFileError):
        read_load(tmp_path / "p.npz")


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(LoadFileError, match="cannot be read: No such file"):
        read_load(tmp_path / "none.csv")


def test_the_table_tells_before_after_bound_and_moves():
    current = linear(num_layers=2, num_experts=4, num_ranks=2, redundant_experts=2)
    solution = solve(LOAD, Topology(nodes=1, ranks_per_node=2), 6, current=current, expert_bytes=2**20)
    assert solution.before_L is not None
    assert solution.moves is not None
    lines = layer_table(solution, solution.before_L).splitlines()
    assert lines[0].split() == ["layer", "before", "after", "bound", "gap", "%", "limit", "moved", "MiB"]
    assert len(lines) == 3
    for layer, line in enumerate(lines[1:]):
        number, before, after, bound, gap, limit, moved, size = line.split()
        assert int(number) == layer
        assert float(before) == pytest.approx(solution.before_L[layer] / solution.mean_L[layer], abs=1e-4)
        assert float(after) == pytest.approx(solution.peak_L[layer] / solution.mean_L[layer], abs=1e-4)
        assert float(bound) <= float(after)
        assert float(gap) == pytest.approx(100 * solution.gap_L[layer], abs=0.01)
        assert limit == solution.reason_L[layer]
        assert int(moved) == float(size) == solution.moves.moves_L[layer]
    words = summary(solution, solution.before_L)
    assert f"moves: {len(solution.moves)} of 12 slots" in words
    assert f"{solution.balancedness_L.mean():.4f}" in words
    assert json.dumps(solution.summary())


def test_a_plot_without_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    placement = linear(num_layers=2, num_experts=4, num_ranks=2)
    with pytest.raises(PlotUnavailable, match=r"pip install 'moe-runtime\[report\]'"):
        plot_rank_loads("png", np.array(LOAD), None, placement)


def test_a_plot_is_a_picture():
    placement = linear(num_layers=2, num_experts=4, num_ranks=2)
    assert plot_rank_loads("png", np.array(LOAD), placement, placement)[:8] == b"\x89PNG\r\n\x1a\n"


def command(tmp_path, *more):
    load = save(tmp_path, "l.csv")
    arguments = [
        "eplb",
        "--load",
        str(load),
        "--topology",
        "1x2",
        "--slots",
        "6",
        "--out",
        str(tmp_path / "p.json"),
    ]
    return run([*arguments, *more])


def test_the_command_writes_a_placement_and_says_what_it_gains(tmp_path, capsys):
    assert command(tmp_path) == 0
    placement = read_placement(tmp_path / "p.json", num_experts=4, num_ranks=2)
    assert (placement.num_layers, placement.num_slots) == (2, 6)
    assert placement.topology == Topology(nodes=1, ranks_per_node=2)
    out, err = capsys.readouterr()
    assert re.search(r"balancedness .*: 0\.\d+ before, \S+ \(worst layer", out)
    assert f"wrote {tmp_path / 'p.json'}" in err


def test_the_command_takes_a_current_placement(tmp_path, capsys):
    first = linear(num_layers=2, num_experts=4, num_ranks=2, redundant_experts=2)
    (tmp_path / "now.json").write_text(to_json(first))
    assert command(tmp_path, "--current", str(tmp_path / "now.json"), "--horizon", "10") == 0
    assert "moves: " in capsys.readouterr().out
    assert read_placement(tmp_path / "p.json").epoch == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--topology", "4"], "write NODESxRANKS"),
        (["--topology", "99999x99999"], "at most 65536"),
        (["--slots", "3"], "slots = 3 cannot hold 4 experts"),
        (["--slots", "999999999999"], "slots = 999999999999: at most"),
        (["--plot", "x.foo"], "x.foo: the ending of a picture must be one of .png, .svg, .pdf"),
        (["--groups", "3"], "groups = 3 must divide"),
        (["--load", "none.csv"], "none.csv: cannot be read"),
        (["--current", "none.json"], "none.json: cannot be read"),
        (["--out", "no/folder/p.json"], "no/folder does not exist"),
    ],
)
def test_bad_inputs_exit_with_2_one_message_and_no_file(more, message, tmp_path, capsys):
    assert command(tmp_path, *more) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "p.json").exists()


def test_an_output_never_replaces_the_loads_or_another_output(tmp_path, capsys):
    load, out = tmp_path / "l.csv", tmp_path / "p.json"
    before = save(tmp_path, "l.csv").read_bytes()
    for more in (["--out", str(load)], ["--plot", str(load)], ["--plot", str(out)]):
        assert command(tmp_path, *more) == 2
        assert "is the same file as" in capsys.readouterr().err
    assert load.read_bytes() == before
