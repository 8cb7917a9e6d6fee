"""The picture of a timeline: which steps it shows, what lies where in it, and that it is one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.report.records import PHASES
from moe_runtime.report.timeline import RankTimeline, Span, write_timeline
from tests.script import ROOT, load_script


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/timeline_png.py")


def step(number: int, at: float) -> list[Span]:
    """20 ms: waiting, attention and experts of layer 1 in both micro-batches, a combine."""
    stretches = [
        (5, -1, -1, "waiting"),
        (4, 1, 0, "attention"),
        (4, 1, 1, "attention"),
        (4, 1, 0, "experts"),
        (3, 1, 1, "combine"),
    ]
    spans = []
    for milliseconds, layer, micro_batch, phase in stretches:
        end = at + 1e-3 * milliseconds
        spans.append(Span(at, end, number, layer, micro_batch, PHASES.index(phase)))
        at = end
    return spans


@pytest.fixture
def trace(tmp_path) -> Path:
    """Two ranks, five forward steps and a long sleep after the third."""
    spans = [s for n in range(3) for s in step(n, 100 + 0.02 * n)]
    spans.append(Span(100.06, 160.0, 3, -1, -1, PHASES.index("waiting")))
    spans += [s for n in range(4, 6) for s in step(n, 160 + 0.02 * (n - 4))]
    timelines = [RankTimeline(instance="decode-0", rank=r, spans=spans) for r in range(2)]
    write_timeline(tmp_path / "t.json", timelines)
    return tmp_path / "t.json"


def test_the_middle_is_whole_forward_steps(script, trace):
    window = script.middle(json.loads(trace.read_text()), instance=None, steps=2)
    assert window.instance == "decode-0"
    assert list(window.steps) == [1, 2]
    assert window.rows == [(rank, row) for rank in range(2) for row in range(3)]
    assert window.end - window.start == pytest.approx(40_000, abs=2)
    first = [b for b in window.bars if b.rank == 1][:3]
    assert [(b.row, b.phase, b.layer) for b in first] == [
        (0, "waiting", -1),
        (1, "attention", 1),
        (2, "attention", 1),
    ]
    assert first[1].start == pytest.approx(5000, abs=2)
    assert first[1].duration == pytest.approx(4000, abs=2)


def test_steps_in_a_row_are_preferred_to_the_very_middle(script, trace):
    """Between steps 2 and 4 all slept for a minute."""
    events = json.loads(trace.read_text())
    assert list(script.middle(events, instance=None, steps=3).steps) == [0, 1, 2]
    assert list(script.middle(events, instance=None, steps=9).steps) == [0, 1, 2]


def test_all_phases_have_a_colour(script):
    assert set(script.COLOURS) == set(PHASES)


def test_it_writes_a_picture_with_the_colours_of_the_phases(script, trace, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "timeline_png.py", trace, tmp_path / "t.png", "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    from matplotlib.image import imread

    pixels = imread(tmp_path / "t.png")[:, :, :3]
    for phase in ("waiting", "attention", "experts", "combine"):
        colour = [int(script.COLOURS[phase][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        share = (abs(pixels - colour).max(axis=2) < 0.01).mean()
        assert share > 0.005, f"{phase}: {share}"


def test_an_unknown_instance_is_named(script, trace):
    with pytest.raises(SystemExit, match="no instance prefill-9; there are decode-0"):
        script.middle(json.loads(trace.read_text()), instance="prefill-9", steps=1)
