"""Scripted events from a file: read, and refused with file, line and field."""

import re
from pathlib import Path

import pytest

from moe_runtime.errors import InputError
from moe_runtime.virtual.cluster.events import Rebalance, Slowdown
from moe_runtime.virtual.run.course import LoadDrift, LoadShift
from moe_runtime.virtual.run.script import FailureAt, read_events

RANKS = {"prefill-0": 2, "decode-0": 4}


def read(folder, text):
    path = folder / "events.yaml"
    path.write_text(text)
    return read_events(path, RANKS)


def test_events_are_read_in_order(tmp_path):
    text = """\
events:
- {slowdown: decode-0, rank: 3, start: 10, end: 20.5, factor: 2}
- failure: prefill-0
  at: 30
- {rebalance: decode-0, at: 0}
- {failure: decode-0, at: 3, restart_after: 2}
- {rebalance: decode-0, at: 5}
- {load_shift: all, at: 7, to: "topic:3"}
- {load_shift: decode, at: 7, to: loads/other.npz, mix: 0.25}
- {load_drift: prefill, start: 1, end: 9, every: 2, noise: 0.5, correlation: 0, seed: 4}
"""
    assert read(tmp_path, text) == [
        Slowdown(instance="decode-0", rank=3, start=10.0, end=20.5, factor=2.0),
        FailureAt(instance="prefill-0", at=30.0),
        Rebalance(instance="decode-0", at=0.0),
        FailureAt(instance="decode-0", at=3.0, restart_after=2.0),
        Rebalance(instance="decode-0", at=5.0),
        LoadShift(deployment="all", at=7.0, to="topic:3", where=f"{tmp_path}/events.yaml:8: events[5]"),
        LoadShift(
            deployment="decode",
            at=7.0,
            to=f"{tmp_path}/loads/other.npz",
            mix=0.25,
            where=f"{tmp_path}/events.yaml:9: events[6]",
        ),
        LoadDrift(deployment="prefill", start=1.0, end=9.0, every=2.0, noise=0.5, correlation=0.0, seed=4),
    ]
    assert read(tmp_path, "events: []") == []


def test_a_slowdown_may_outlast_the_instance(tmp_path):
    slow = "{slowdown: decode-0, rank: 0, start: 2, end: 9, factor: 2}"
    assert len(read(tmp_path, f"events:\n- {{failure: decode-0, at: 3}}\n- {slow}")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have the key events"),
        ("events: {}", "yaml:1: events: must be a list"),
        ("happenings: []", "must have the key events"),
        (
            "events:\n- {at: 3}",
            r"yaml:2: events\[0\]: must have one of the keys slowdown, failure, rebalance, load_shift, load",
        ),
        ("events:\n- {slowdwn: decode-0}", r"events\[0\]: .* did you mean slowdown by 'slowdwn'\?"),
        ("events:\n- {at: 3, failure-0: decode}", "load_drift$"),
        ("events:\n- {failure: decode-0, at: 1}\n- 3", r"events\[1\]: must have one of"),
        ("events:\n- {failure: decode-0, rebalance: decode-0, at: 1}", "must have one of"),
        ("events:\n\n- {failure: decode-9, at: 3}", "yaml:3: .*'decode-9': the plan has prefill-0, decode-0"),
        ("events:\n- {failure: decode-0}", "at is None, must be a number from 0"),
        ("events:\n- {failure: decode-0, at: -1}", "at is -1"),
        ("events:\n- {failure: decode-0, at: .inf}", "at is inf"),
        ("events:\n- {failure: decode-0, at: true}", "at is True"),
        ("events:\n- {failure: decode-0, at: 1, rank: 0}", "a failure has no 'rank'"),
        ("events:\n- {slowdown: decode-0, rank: 4, start: 0, end: 1, factor: 2}", "rank is 4, .* to 3"),
        ("events:\n- {slowdown: decode-0, rank: 0, start: 2, end: 1, factor: 2}", "end is 1, .* from 2"),
        ("events:\n- {slowdown: decode-0, rank: 0, start: 2, end: 3, factor: 0.5}", "factor is 0.5"),
        ("events:\n- {failure: [decode-0], at: 3}", r"yaml:2: .*failure is \['decode-0'\]: the plan has"),
        ("events:\n- {failure: {a: 1}, at: 3}", "the plan has prefill-0, decode-0"),
        ("events:\n- {slowdown: decode-0, rank: 0, start: 2, end: 3, factor: 1e300}", "factor is 1e.300"),
        (f"events:\n- {{failure: decode-0, at: 1{'0' * 400}}}", "must be a number from 0 to 1e.10"),
        (
            "events:\n- {rebalance: decode-0, at: 9}\n- {failure: decode-0, at: 3}",
            r"yaml:2: events\[0\]: decode-0 has failed at 3, and stays away",
        ),
        (
            "events:\n- {failure: decode-0, at: 3}\n- {failure: prefill-0, at: 3}\n"
            "- {failure: decode-0, at: 3}",
            r"yaml:4: events\[2\]: decode-0 has failed",
        ),
        (
            "events:\n- {failure: decode-0, at: 3}\n"
            "- {slowdown: decode-0, rank: 0, start: 5, end: 9, factor: 2}",
            r"yaml:3: events\[1\]: decode-0 has failed",
        ),
        (
            "events:\n- {failure: decode-0, at: 3, restart_after: 9}\n- {rebalance: decode-0, at: 11}",
            r"yaml:3: events\[1\]: decode-0 has failed at 3, and is started anew 9 s later",
        ),
        (
            "events:\n- {failure: decode-0, at: 3, restart_after: soon}",
            "restart_after is 'soon', must be a num",
        ),
        (
            "events:\n- {load_shift: decode-0, at: 3, to: start}",
            "'decode-0': the plan has all, prefill, decode",
        ),
        (
            "events:\n- {load_shift: decode, at: 3}",
            "to is None, must be start, topic:NUMBER, recorded, .* or a file",
        ),
        (
            "events:\n- {load_shift: decode, at: 3, to: start, mix: 2}",
            "mix is 2, must be a number from 0 to 1",
        ),
        ("events:\n- {load_shift: decode, start: 3, to: start}", "a load_shift has no 'start'; its keys are"),
        (
            "events:\n- {load_drift: all, start: 0, end: 9e9, every: 1, noise: 1, correlation: 0}",
            "every is 1: the loads change at most 10000 times",
        ),
        (
            "events:\n- {load_drift: all, start: 0, end: 9, every: 1, noise: 1, correlation: 1.5}",
            "correlation is 1.5",
        ),
        (
            "events:\n- {load_drift: all, start: 0, end: 9, every: 1, noise: 1, correlation: 0, seed: -1}",
            "seed is -1",
        ),
        ("events: [3]", r"yaml:1: events\[0\]: must have one of"),
        ("events: [", "not valid YAML"),
        ("events: []\nevents: []", "given twice"),
    ],
)
def test_mistakes_have_their_place(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as raised:
        read(tmp_path, text)
    assert "events.yaml" in str(raised.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_events(tmp_path / "none.yaml", RANKS)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not text"):
        read_events(tmp_path / "binary.yaml", RANKS)


def test_what_the_docs_show_can_be_read(tmp_path):
    text = (Path(__file__).resolve().parents[3] / "docs" / "simulation.md").read_text()
    blocks = re.findall(r"^```\n(events:\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    first, second = (read(tmp_path, block) for block in blocks)
    assert {type(e) for e in first} == {Slowdown, Rebalance, FailureAt, LoadShift, LoadDrift}
    assert [type(e) for e in second] == [LoadShift]
