"""Log: a line per request and event on stderr, for people or for programs.

Owns both line forms. What is worth a line, and its fields, is the caller's business; prompts and
outputs are never among them.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Form = Literal["plain", "json"]


class Log:
    """Writes lines through `write`. `common` fields go on every line of JSON."""

    def __init__(self, form: str, write: Callable[[str], None], common: Mapping[str, Any]) -> None:
        self._json = form == "json"
        self._write = write
        self._common = dict(common)

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        """One line: when, what, and its fields, those that are None left out."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        known = {k: v for k, v in fields.items() if v is not None}
        if self._json:
            line = {"time": now, "event": event, **self._common, **known}
            self._write(msgspec.json.encode(line).decode())
            return
        parts = [f"{k}={_plain(v)}" for k, v in known.items()]
        self._write(" ".join([now, event, *parts]))


def _plain(value: object) -> str:
    """A value without anything that could be taken for the next field, or another line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)
