"""RUN.json on disk, and its documentation."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from moe_runtime.errors import InputError
from moe_runtime.report import schema, schema_time
from moe_runtime.report.build import build_report
from moe_runtime.report.files import load_report, save_report
from moe_runtime.report.machine import _memory_bytes, read_commit, read_machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def saved(make, tmp_path):
    report = build_report(*make.run())
    path = tmp_path / "RUN.json"
    save_report(path, report)
    return path, report


def test_a_report_survives_the_disk(saved):
    path, report = saved
    assert load_report(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["RUN.json"]
    assert path.read_text().startswith('{\n  "schema_version": 2,')


def test_lists_of_numbers_take_one_line_and_texts_are_left_alone(saved, tmp_path):
    _, report = saved
    odd = msgspec.structs.replace(report, warnings=("[ 1,\n  2 ]", "[\n 3 ]"), commit="[\n4\n]")
    save_report(tmp_path / "odd.json", odd)
    assert load_report(tmp_path / "odd.json") == odd
    lines = (tmp_path / "odd.json").read_text().splitlines()
    queue = report.deployments[0].timeline.queue
    assert f'        "queue": {json.dumps(list(queue))}' in [line.rstrip(",") for line in lines]


def _cut_loads(deployment):
    deployment["rank_loads"]["after"].pop()


def _cut_column(deployment):
    deployment["timeline"]["queue"].pop()


def _blow_up(deployment):
    deployment["timeline"]["queue"][0] = 1e308


def _lose_phase(deployment):
    deployment["phases"].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut_loads, "prefill.rank_loads"),
        (_cut_column, "columns of the same length - at `\\$.deployments.prefill.timeline"),
        (_blow_up, "numbers below 1e.100"),
        (_lose_phase, "the same parts of their time"),
    ],
)
def test_tables_that_do_not_fit_together_are_named(saved, change, message):
    path, _ = saved
    data = json.loads(path.read_text())
    change(data["deployments"][0])
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        load_report(path)


def test_failed_write_leaves_the_old_report(saved, monkeypatch):
    path, report = saved
    before = path.read_bytes()

    def no_rename(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_rename)
    with pytest.raises(InputError, match="No space left"):
        save_report(path, msgspec.structs.replace(report, created="later"))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["RUN.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=3), "is 3, this version of moe-runtime reads 1 to 2"),
        (lambda d: d.update(schema_version=1, window=1), "window"),
        (lambda d: d.pop("schema_version"), "schema_version"),
        (lambda d: d.pop("window"), "window"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d["deployments"][1].update(steps="many"), r"deployments\[1\]|deployments\[...\]"),
        (lambda d: d["window"].update(basis="guess"), "basis"),
    ],
)
def test_what_is_not_a_report_of_this_version_is_refused(saved, change, message):
    path, _ = saved
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message) as raised:
        load_report(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("damaged", [b'{"schema_version": 2, "window": ' + b"[" * 100_000, None])
def test_what_is_not_json_is_refused(saved, damaged):
    path, _ = saved
    path.write_bytes(damaged or path.read_bytes().replace(b"prefill", b"pre\xffill"))
    with pytest.raises(InputError, match=r"RUN\.json: not a"):
        load_report(path)


def test_a_report_of_version_1_is_read_and_says_what_it_lacks(saved):
    path, report = saved
    data = json.loads(path.read_bytes())
    for name in ("simulated", "simulation"):
        del data[name]
    for section in data["deployments"]:
        for name in ("attribution", "timeline", "rank_loads", "balancing"):
            del section[name]
    new = ("simulation", "attribution", "timeline", "rank_loads", "balancing")
    data["missing"] = [m for m in data["missing"] if m["path"].split(".")[-1] not in new]
    path.write_text(json.dumps({**data, "schema_version": 1}))
    old = load_report(path)
    assert not old.simulated
    assert old.latency == report.latency
    lacking = {m.path for m in old.missing if "version 1" in m.reason}
    assert lacking == {
        "simulation",
        *(f"deployments.{d}.{name}" for d in ("prefill", "decode") for name in new[1:]),
    }
    save_report(path, old)
    assert load_report(path) == old


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "PK\x03\x04"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InputError, match="not a report"):
        load_report(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_report(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot be read"):
        load_report(tmp_path)


def structs():
    names = {**vars(schema), **vars(schema_time)}
    found = [v for v in names.values() if isinstance(v, type) and issubclass(v, msgspec.Struct)]
    return [v for v in found if v is not msgspec.Struct]


def test_every_field_is_documented():
    text = (ROOT / "docs" / "report.md").read_text()
    words = {part for code in re.findall(r"`([^`]+)`", text) for part in re.split(r"[^a-z0-9_]+", code)}
    undocumented = {f for s in structs() for f in s.__struct_fields__} - words
    assert not undocumented


def test_json_schema_has_every_struct():
    definitions = schema.json_schema()["$defs"]
    assert set(definitions) == {s.__name__ for s in structs()}
    assert set(definitions["Report"]["required"]) == set(schema.Report.__struct_fields__)


def test_this_machine_is_described():
    machine = read_machine(hardware="cpu-host", device="cpu")
    assert machine.cores is not None
    assert machine.cores >= 1
    assert machine.memory_bytes is None or machine.memory_bytes > 2**20
    commit = read_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}\+?", commit)


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal:  1000 kB\n", None, 1_024_000),
        ("MemTotal:  1000 kB\n", "max\n", 1_024_000),
        ("MemTotal:  1000 kB\n", "5000\n", 5000),
        ("MemTotal:  1000 kB\n", "2000000\n", 1_024_000),
        ("MemFree: 1 kB\n", "5000", None),
        (None, "5000", None),
    ],
)
def test_memory_is_what_the_process_may_use(tmp_path, meminfo, limit, expected):
    files = [tmp_path / "meminfo", tmp_path / "memory.max"]
    for path, text in zip(files, (meminfo, limit), strict=True):
        if text is not None:
            path.write_text(text)
    assert _memory_bytes(*files) == expected
