"""RUN.json on disk: written whole or not at all, read strictly; reports of version 1 are read as well."""

import re
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from moe_runtime.errors import InputError
from moe_runtime.files import write_atomically
from moe_runtime.report.schema import OLDEST_VERSION, SCHEMA_VERSION, Report

_NEW_REASON = "the report is of schema version 1, which had no such field"

_LARGEST = 1e100  # of a number in a chart

# A list of numbers that was indented. No text of JSON has a line break in it.
_NUMBERS = re.compile(rb"\[\n([^\[\]{}\"]*)\]")


class _Head(msgspec.Struct, frozen=True):
    schema_version: int


def save_report(path: Path, report: Report) -> None:
    """Write a report as indented JSON, lists of numbers on one line; InputError if that cannot be done."""
    indented = msgspec.json.format(msgspec.json.encode(report), indent=2)
    write_atomically(path, _NUMBERS.sub(lambda m: b"[" + b" ".join(m[1].split()) + b"]", indented) + b"\n")


def load_report(path: Path) -> Report:
    """Read a report; InputError naming the file and field if it is none, or of an unknown schema version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(data, type=_Head).schema_version
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a report of moe-runtime: {error}") from error
    if not OLDEST_VERSION <= version <= SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version is {version}, this version of moe-runtime reads"
            f" {OLDEST_VERSION} to {SCHEMA_VERSION}"
        )
    try:
        if version == 1:
            report = _from_version_1(msgspec.json.decode(data, type=dict[str, Any]))
        else:
            report = msgspec.json.decode(data, type=Report)
        _require_tables(report)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a valid report: {error}") from error
    return report


def _from_version_1(data: dict[str, Any]) -> Report:
    """Measured, and without the fields that tell where time went. Raises ValidationError."""
    deployments = data.get("deployments")
    new = {"schema_version": SCHEMA_VERSION, "simulated": False, "simulation": None}
    paths = ["simulation"]
    for section in deployments if isinstance(deployments, list) else ():
        if isinstance(section, dict):
            fields = ("attribution", "timeline", "rank_loads", "balancing")
            section.update(dict.fromkeys(fields))
            paths += [f"deployments.{section.get('name')}.{field}" for field in fields]
    missing = data.get("missing")
    if isinstance(missing, list):
        missing += [{"path": path, "reason": _NEW_REASON} for path in paths]
    return msgspec.convert({**data, **new}, type=Report)


def _require_tables(report: Report) -> None:
    """ValidationError where what belongs together has not the same length, names or a number to draw."""
    for d in report.deployments:
        path = f"deployments.{d.name}"
        if d.rank_loads is not None:
            for rows in (d.rank_loads.before, d.rank_loads.after):
                if rows is not None and (len(rows) != len(d.balancedness) or len({*map(len, rows)}) != 1):
                    _odd(f"{path}.rank_loads", "must have a row for each layer of balancedness, equally long")
        if d.timeline is not None:
            columns = [c for c in msgspec.structs.astuple(d.timeline) if isinstance(c, tuple)]
            if len({*map(len, columns)}) != 1:
                _odd(f"{path}.timeline", "must have columns of the same length")
            if any(v is not None and not abs(v) < _LARGEST for column in columns for v in column):
                _odd(f"{path}.timeline", f"must have numbers below {_LARGEST:g}")
    totals = [d.attribution.total for d in report.deployments if d.attribution is not None]
    shares = ([t.parts for t in totals], [t.bounds for t in totals])
    names = [{tuple(s.name for s in one) for one in kind} for kind in shares]
    phases = {tuple(p.phase for p in d.phases) for d in report.deployments if d.phases}
    if any(len(n) > 1 for n in (*names, phases)):
        _odd("deployments", "must name the same parts of their time")


def _odd(path: str, problem: str) -> NoReturn:
    raise msgspec.ValidationError(f"{problem} - at `$.{path}`")
