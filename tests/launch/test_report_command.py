"""`moe-runtime report`: what it writes, and what it refuses before it does."""

import csv

import pytest

from moe_runtime.launch import cli
from moe_runtime.report.build import build_report
from moe_runtime.report.files import save_report
from tests.report.conftest import Make
from tests.report.html.page_reader import read


@pytest.fixture
def runs(tmp_path):
    for name in ("a.json", "b.json"):
        save_report(tmp_path / name, build_report(*Make().run()))
    return tmp_path


def run(*arguments) -> int:
    return cli.run(["report", *map(str, arguments)])


def test_all_outputs_of_two_runs(runs, capsys):
    outputs = ("--html", runs / "o.html", "--markdown", runs / "o.md", "--csv", runs / "o.csv")
    assert run(runs / "a.json", runs / "b.json", *outputs, "--price-per-node-hour", "20") == 0
    out, err = capsys.readouterr()
    assert "Runs 1 to 2 of 2" in out
    assert "Cost of a million tokens, at 20 per node-hour" in out
    assert [line.split()[0] for line in err.splitlines()] == ["wrote"] * 3
    html = read((runs / "o.html").read_text())
    assert [n.text() for n in html.find("title")][0] == "Report of a.json, b.json"
    assert {"cost", "comparison"} <= {n.attributes.get("id") for n in html.find("h2")}
    assert "## Cost of a million tokens" in (runs / "o.md").read_text()
    rows = list(csv.reader((runs / "o.csv").open(newline="")))
    assert rows[0] == ["field", "a.json", "b.json"]
    assert ["price_per_node_hour", "20.0", "20.0"] in rows


def test_one_run_has_no_comparison_and_no_cost_unless_asked(runs):
    assert run(runs / "a.json", "--html", runs / "o.html") == 0
    html = read((runs / "o.html").read_text())
    assert not {"cost", "comparison"} & {n.attributes.get("id") for n in html.find("h2")}


def test_runs_of_the_same_file_name_are_told_apart(runs):
    (runs / "other").mkdir()
    save_report(runs / "other" / "a.json", build_report(*Make().run()))
    assert run(runs / "a.json", runs / "other" / "a.json", "--csv", runs / "o.csv") == 0
    with (runs / "o.csv").open(newline="") as file:
        assert next(csv.reader(file))[1:] == [str(runs / "a.json"), str(runs / "other" / "a.json")]


def test_an_output_never_replaces_a_run(runs, capsys):
    before = (runs / "a.json").read_bytes()
    assert run(runs / "a.json", "--html", runs / "a.json") == 2
    assert "is the same file as RUN.json 1" in capsys.readouterr().err
    assert run(runs / "a.json", "--html", runs / "o", "--csv", runs / "o") == 2
    assert run(runs / "a.json", "--html", runs / "nowhere" / "o.html") == 2
    assert (runs / "a.json").read_bytes() == before
    with pytest.raises(SystemExit):
        run(runs / "a.json", "--price-per-node-hour", "0")
