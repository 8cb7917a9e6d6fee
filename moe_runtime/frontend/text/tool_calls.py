"""Tool calls in a model's output: what every format's parser gives.

Owns the common types; the formats are in `tools_deepseek` and `tools_hermes`, the choice among them in
`tool_parsers`. A parser's result does not depend on how the text was cut into pieces.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """News of call `index`: its `name` comes first and once, then its arguments (JSON text) in pieces."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """What a piece of output made certain: text beside the calls, and news of calls in order."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ToolParser(Protocol):
    """Reads one output. Text that is no call after all comes out as content, tags and all."""

    @property
    def num_calls(self) -> int:
        """Calls whose name is known."""

    def feed(self, text: str) -> ToolDelta:
        """What `text` makes certain."""

    def finish(self) -> ToolDelta:
        """What was held back, now that nothing more comes."""


class Deltas:
    """Gathers what one `feed` found, and counts the calls of an output."""

    __slots__ = ("_calls", "_content", "count")

    def __init__(self) -> None:
        self.count = 0
        self._content = ""
        self._calls: list[CallDelta] = []

    def content(self, text: str) -> None:
        self._content += text

    def begin(self, name: str) -> None:
        """A new call; `arguments` belong to it from now on."""
        self._calls.append(CallDelta(index=self.count, name=name))
        self.count += 1

    def arguments(self, text: str) -> None:
        if text:
            self._calls.append(CallDelta(index=self.count - 1, arguments=text))

    def take(self) -> ToolDelta:
        """What was gathered since the last call."""
        delta = ToolDelta(content=self._content, calls=tuple(self._calls))
        self._content, self._calls = "", []
        return delta
