"""What the look at a report's page checks without a browser, and what it says where there is none."""

import pytest

from moe_runtime.report.build import build_report
from moe_runtime.report.html.figures import Run
from moe_runtime.report.html.page import render_page
from tests.report.conftest import Make
from tests.report.html.page_reader import read
from tests.script import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/look_at_report.py")


def test_figures_are_compared_with_the_report(script):
    report = build_report(*Make().run())
    shown = [
        (int(n.attributes["data-run"] or ""), n.attributes["data-path"] or "", n.text())
        for n in read(render_page([("run", report)])).all()
        if "data-path" in n.attributes
    ]
    runs = [Run.of(0, "run", report)]
    assert len(shown) > 500
    assert script.wrong_figures(shown, runs) == []
    path = "deployments.decode.throughput.output.per_node_of_role"
    right = next(text for _, p, text in shown if p == path)
    assert script.wrong_figures([(0, path, right + "1")], runs) == [
        f"run 0, {path}: {right + '1'!r} for {runs[0].value(*path.split('.'))!r}"
    ]


def test_without_a_browser_it_says_so(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "PROGRAMS", ("no-such-browser",))
    assert script.main([str(tmp_path / "page.html"), str(tmp_path / "run.json")]) == 2
    assert "Chromium is not installed (looked for no-such-browser)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
