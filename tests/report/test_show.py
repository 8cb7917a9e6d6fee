"""The report as text: what a reader must find, and that it fits."""

import io
import re

import msgspec
import pytest

from moe_runtime.report.build import build_report
from moe_runtime.report.compare import render_many
from moe_runtime.report.show import number, render, use_color

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def report(make):
    return build_report(*make.run())


def line_with(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


def test_throughput_comes_first_and_names_its_denominators(report):
    text = render(report)
    titles = [line for line in text.splitlines() if line.startswith(("Throughput", "Deployments", "Latency"))]
    assert titles[0] == "Throughput per node, tokens/s"
    assert line_with(text, "all, per node of all (1 node)").split()[-3:] == ["0.950", "1.52", "0.380"]
    assert line_with(text, "prefill, per node of prefill (0.33 nodes)").split()[-3:] == [
        "0.570",
        "4.56",
        "1.14",
    ]
    assert line_with(text, "decode, per node of decode (0.67 nodes)").split()[-3:] == ["1.14", "0", "0"]


def test_all_sections_are_there(report):
    text = render(report)
    assert "prefill (EP 2, 0.33 nodes)   decode (EP 4, 0.67 nodes)" in text
    assert line_with(text, "time to first token (TTFT)").split()[-4:] == ["500", "500", "500", "500"]
    assert "TTFT <= 2000 ms and TPOT <= 100 ms" in " ".join(text.split())
    assert "decode only, without its TTFT" in " ".join(text.split())
    for phase in ("attention", "routing", "dispatch", "experts", "combine", "other", "waiting"):
        assert line_with(text, phase)
    assert report.window.note in " ".join(text.split())
    assert "Warnings" not in text


def test_worst_layers_of_each_deployment_are_shown(report):
    worst = min(report.deployments[1].balancedness, key=lambda b: b.mean)
    rows = [line.split() for line in render(report).splitlines() if re.match(r"decode +\d", line)]
    assert len(rows) == 3
    assert rows[0][1:3] == [str(worst.layer), number(worst.mean)]


def test_a_single_rank_has_no_balance_to_show(report):
    alone = [msgspec.structs.replace(d, expert_parallel=1) for d in report.deployments]
    assert "Balancedness" not in render(msgspec.structs.replace(report, deployments=tuple(alone)))


def test_a_changed_tree_is_shown(report):
    assert "commit 0123456789ab, " in render(report)
    changed = msgspec.structs.replace(report, commit=report.commit + "+")
    assert "commit 0123456789ab+, " in render(changed)
    assert "commit unknown, " in render(msgspec.structs.replace(report, commit=None))


def test_missing_numbers_are_na_with_their_reason(make):
    facts, requests, _ = make.run()
    text = render(build_report(facts, requests, []))
    assert line_with(text, "mean step, ms").split()[-2:] == ["n/a", "n/a"]
    assert "Not available (n/a)" in text
    assert "deployments.prefill.mean_step_ms" in text
    assert "Balancedness" not in text


def test_warnings_are_shown_with_hanging_indent(make):
    long = " ".join(["word"] * 60)
    text = render(build_report(make.facts(notes=(long,)), *make.run()[1:]))
    after = text[text.index("Warnings") :].splitlines()
    assert after[1].startswith("- word")
    assert after[2].startswith("  word")


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", [80, 100])
def test_lines_fit(make, report, color, width):
    failing = build_report(
        make.facts(commit=None, slo=(1.0, 1.0), notes=("x" * 150,)), *make.run(seconds=3)[1:]
    )
    many = [(f"results/run-{i}.json", report) for i in range(9)]
    for text in (render(report, color=color, width=width), render(failing, color=color, width=width)):
        assert max(len(ESCAPE.sub("", line)) for line in text.splitlines()) <= width
    text = render_many(many, color=color, width=width)
    assert max(len(ESCAPE.sub("", line)) for line in text.splitlines()) <= width


def test_plain_text_is_ascii_without_escapes(report):
    plain, coloured = render(report), render(report, color=True)
    assert plain.isascii()
    assert "\x1b" not in plain
    assert "\x1b[1m" in coloured


def test_user_text_is_not_markup(make, report):
    odd = msgspec.structs.replace(report, model=msgspec.structs.replace(report.model, path="[bold]x[/nope]"))
    assert "[bold]x[/nope] (deepseek_v3" in render(odd)
    assert "[red]r[/x]" in render_many([("[red]r[/x]", report)])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_only_on_terminals_that_want_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert use_color(Terminal())
    assert not use_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color(Terminal())


def test_several_runs_stand_side_by_side(make, report):
    slower = build_report(*make.run(seconds=200.0))
    text = render_many([("a.json", report), ("b.json", slower)])
    assert line_with(text, "output tokens/s per node of all").split()[-2:] == ["0.950", "0.475"]
    assert line_with(text, "decode: instances x EP").split()[-6:] == ["1", "x", "4", "1", "x", "4"]
    assert "differ" not in text


def test_what_makes_runs_incomparable_is_said(make, report):
    machine = msgspec.structs.replace(report.machine, cores=64)
    other = msgspec.structs.replace(report, machine=machine, deployments=report.deployments[:1])
    text = render_many([("a.json", report), ("b.json", other)])
    assert "The machines of these runs differ." in text
    assert line_with(text, "decode: instances x EP").split()[-1] == "-"


def test_many_runs_go_on_below(report):
    text = render_many([(f"{i}.json", report) for i in range(5)])
    assert "Runs 1 to 4 of 5" in text
    assert "Runs 5 to 5 of 5" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "n/a"),
        (0, "0"),
        (0.0, "0"),
        (0.9996, "1.00"),
        (0.0123, "0.012"),
        (9.999, "10.0"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (1234567, "1,234,567"),
        (999.9, "1,000"),
    ],
)
def test_numbers(value, shown):
    assert number(value) == shown
