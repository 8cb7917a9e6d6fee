"""Reports as CSV and Markdown, and what tokens cost."""

import csv
import io
import json
import re

import msgspec
import pytest

from moe_runtime.report.build import build_report
from moe_runtime.report.cost import costs, costs_as_text
from moe_runtime.report.csv_table import render_csv
from moe_runtime.report.markdown import escape, render_markdown
from moe_runtime.report.reference import Reference

REFERENCE = Reference(
    id="r",
    model="m",
    role="decode",
    value=22282.0,
    gpus=8,
    machine="h100",
    conditions="EP 72",
    read="in the text",
    source="A | B",
)


@pytest.fixture(scope="module")
def report(make):
    return build_report(*make.run())


def test_csv_has_every_figure_as_it_is(report):
    other = msgspec.structs.replace(report, commit=None, deployments=report.deployments[:1])
    rows = list(csv.reader(io.StringIO(render_csv([("a", report), ("b", other)]))))
    assert rows[0] == ["field", "a", "b"]
    cells = {row[0]: row[1:] for row in rows}
    assert float(cells["latency.ttft_ms.p99"][0]) == report.latency.ttft_ms.p99
    decode = report.deployments[1]
    path = "deployments.decode.throughput.output.per_node_of_role"
    assert [float(cells[path][0]), cells[path][1]] == [decode.throughput.output.per_node_of_role, ""]
    assert cells["commit"] == [report.commit, ""]
    assert cells["window.short"] == ["false", "false"]
    assert float(cells["deployments.decode.balancedness.2.mean"][0]) == decode.balancedness[2].mean
    assert not [path for path in cells if path.startswith(("plan.", "request_log", "missing"))]

    def scalars(value):
        if isinstance(value, dict):
            return sum(scalars(v) for k, v in value.items() if k not in LEFT_OUT)
        return sum(map(scalars, value)) if isinstance(value, list) else 1

    assert len(rows) - 1 == scalars(json.loads(msgspec.json.encode(report)))


LEFT_OUT = {"plan", "request_log", "timeline", "rank_loads", "rebalances", "missing", "schema_version"}


def test_csv_starts_no_formula(report):
    hostile = msgspec.structs.replace(report, commit="=1+1", version='@a,"b"\n')
    text = render_csv([("-run", hostile)])
    cells = {row[0]: row[1] for row in csv.reader(io.StringIO(text))}
    assert (cells["field"], cells["commit"], cells["version"]) == ("'-run", "'=1+1", '\'@a,"b"\n')


def test_costs_by_hand(report):
    by_role = {(c.role, c.kind): c.per_million for c in costs(report, 36.0)}
    decode = report.deployments[1].throughput.output.per_node_of_role
    assert set(by_role) == {
        (None, "new_prefill"),
        (None, "output"),
        ("prefill", "new_prefill"),
        ("decode", "output"),
    }
    assert by_role["decode", "output"] == pytest.approx(36.0 * 1e6 / (3600 * decode))
    # A fleet's cost for its output is what its roles' nodes cost together: the rate is over all nodes.
    whole = report.system.throughput.output.per_node_of_all
    assert by_role[None, "output"] == pytest.approx(10_000 / whole)
    idle = msgspec.structs.replace(
        report.system.throughput.output, total=0.0, per_rank=0.0, per_node_of_role=0.0, per_node_of_all=0.0
    )
    silent = msgspec.structs.replace(
        report,
        system=msgspec.structs.replace(
            report.system, throughput=msgspec.structs.replace(report.system.throughput, output=idle)
        ),
    )
    assert {c.role: c.per_million for c in costs(silent, 1.0) if c.kind == "output"}[None] is None
    text = costs_as_text([("a", silent)], 2.5)
    assert text.startswith("Cost of a million tokens, at 2.5 per node-hour\n")
    assert "output, charged to all nodes: n/a" in text


def test_a_unified_deployment_is_charged_for_both(report):
    alone = msgspec.structs.replace(report.deployments[1], name="unified")
    found = costs(msgspec.structs.replace(report, deployments=(alone,)), 1.0)
    assert [(c.role, c.kind) for c in found[2:]] == [("unified", "new_prefill"), ("unified", "output")]


def test_markdown_tables_are_whole(report):
    hostile = "a|b`<img src=x>`\n# [c](http://d) *e*"
    spoiled = msgspec.structs.replace(
        report, model=msgspec.structs.replace(report.model, path=hostile), warnings=(hostile,)
    )
    text = render_markdown([(hostile, spoiled), ("other", report)], [REFERENCE], 10.0)
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
            assert len(widths) == 1, block
            assert set(lines[1]) <= set("| -:")
    assert not re.search(r"(?<!\\)[<\[]", text)
    assert "22,282" in text
    assert "A \\| B" in text
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert titles == [
        "Runs side by side",
        "Throughput per node, tokens/s",
        "Latency",
        "Deployments",
        "Where time goes, share of a step",
        "Cost of a million tokens, at 10 per node-hour",
        "Published figures",
    ]


def test_markdown_says_what_the_report_says(report):
    text = render_markdown([("run.json", report)])
    assert text.startswith("# checkpoints/small\n")
    row = next(line for line in text.splitlines() if "decode (EP 4, 0.67 nodes) | output" in line)
    assert row == "| run.json | decode (EP 4, 0.67 nodes) | output | 0.760 | 0.190 | 1.14 | 0.760 |"
    assert "| run.json | TTFT, ms | 500 | 500 | 500 | 500 |" in text
    assert "Published" not in text
    assert "Cost" not in text


def test_escaped_text_stays_on_its_line():
    assert escape("a\n b|c_d") == "a b\\|c\\_d"
