"""Files of JSON lines written by users: every complaint names file, line and field.

Owns reading and the checks of single values; what the fields mean is the caller's business.
"""

import codecs
import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from moe_runtime.errors import InputError
from moe_runtime.files import read_regular

_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One JSON object and where it stands: `where` is `file:line`, lines from 1."""

    where: str
    fields: dict[str, Any]

    def fail(self, field: str, problem: str) -> NoReturn:
        raise InputError(f"{self.where}: {field}: {problem}")

    def has(self, field: str) -> bool:
        return field in self.fields

    def only(self, known: Sequence[str]) -> None:
        """InputError unless all fields are known ones."""
        for name in self.fields:
            if name not in known:
                self.fail(name, f"unknown field; {_suggest(name, known)}")

    def no_misspelling(self, known: Sequence[str]) -> None:
        """InputError for an unknown field that looks like a known one; other fields are let through."""
        for name in self.fields:
            if name not in known and (near := difflib.get_close_matches(name, known, n=1, cutoff=0.75)):
                self.fail(name, f"unknown field; did you mean {near[0]}?")

    def integer(self, field: str, *, default: int | None = None, low: int = 0) -> int:
        """An integer in [low, 2**63); without a default the field is required."""
        value = self._get(field, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(field, f"must be an integer, not {_kind(value)}")
        if not low <= value <= _LARGEST:
            self.fail(
                field, f"is {value}, must be {low} or more" if value < low else f"is {value}, too large"
            )
        return value

    def number(
        self, field: str, *, default: float | None = None, low: float = -math.inf, high: float = math.inf
    ) -> float:
        """A finite number from low to high."""
        value = self._get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(field, f"must be a number, not {_kind(value)}")
        if not math.isfinite(value) or value < low:
            self.fail(field, f"is {value}, must be {low:g} or more")
        if value > high:
            self.fail(field, f"is {value}, must be {high:g} or less")
        return float(value)

    def boolean(self, field: str, *, default: bool) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            self.fail(field, f"must be true or false, not {_kind(value)}")
        return value

    def text(self, field: str) -> str:
        """A string of at least one character."""
        value = self._get(field, None)
        if not isinstance(value, str):
            self.fail(field, f"must be a string, not {_kind(value)}")
        if not value:
            self.fail(field, "is empty")
        return value

    def integers(self, field: str) -> tuple[int, ...]:
        """A list of integers in [0, 2**63)."""
        value = self._get(field, None)
        if not isinstance(value, list):
            self.fail(field, f"must be a list of integers, not {_kind(value)}")
        for position, item in enumerate(value):
            if not isinstance(item, int) or isinstance(item, bool):
                self.fail(f"{field}[{position}]", f"must be an integer, not {_kind(item)}")
            if not 0 <= item <= _LARGEST:
                self.fail(
                    f"{field}[{position}]", f"is {item}, must be 0 or more" if item < 0 else "is too large"
                )
        return tuple(value)

    def _get(self, field: str, default: Any) -> Any:
        if field not in self.fields and default is None:
            self.fail(field, "is missing")
        return self.fields.get(field, default)


def read_lines(path: Path) -> Iterator[Line]:
    """The objects of a file, blank lines skipped.

    Raises InputError for a line that is not a JSON object, and for a file without lines.
    """
    raw = read_regular(path).removeprefix(codecs.BOM_UTF8)
    empty = True
    for number, text in enumerate(raw.split(b"\n"), start=1):
        if not text.strip():
            continue
        empty = False
        where = f"{path}:{number}"
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InputError(f"{where}: must be a JSON object, not {_kind(value)}")
        yield Line(where=where, fields=value)
    if empty:
        raise InputError(f"{path}: has no lines")


def _suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"{value}")
