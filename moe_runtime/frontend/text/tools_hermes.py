"""Tool calls as Hermes and Qwen models write them: JSON objects between tags.

    { <tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call> }

Arguments that follow the name, as the models are told to write, are passed on while they come; in
any other order the call is read when its tag closes.
"""

import json
import re

from moe_runtime.frontend.text.markers import MarkerScan
from moe_runtime.frontend.text.tool_calls import Deltas, ToolDelta

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


class HermesParser:
    """White space after a call is dropped; all other text outside of the tags is content."""

    def __init__(self) -> None:
        self._deltas = Deltas()
        self._state = "content"
        self._scan = MarkerScan([OPEN])
        self._body = ""
        self._value = _ObjectEnd()

    @property
    def num_calls(self) -> int:
        return self._deltas.count

    def feed(self, text: str) -> ToolDelta:
        while text:
            match self._state:
                case "content" | "after":
                    text = self._content(text)
                case "body":
                    text = self._in_body(text)
                case "arguments":
                    text = self._arguments(text)
                case "tail":
                    text = self._tail(text)
        return self._deltas.take()

    def finish(self) -> ToolDelta:
        if self._state == "body":
            self._deltas.content(OPEN + self._body)
        elif self._state == "content":
            self._deltas.content(self._scan.finish())
        return self._deltas.take()

    def _content(self, text: str) -> str:
        if self._state == "after":
            text = text.lstrip()
            if not text:
                return ""
            self._state = "content"
        found = self._scan.feed(text)
        self._deltas.content(found.text)
        if found.marker is not None:
            self._state, self._body = "body", ""
        return found.rest

    def _in_body(self, text: str) -> str:
        """Gather the object until its head is complete, or until its tag closes."""
        body = self._body + text
        head = _HEAD.match(body)
        close = body.find(CLOSE)
        if head is not None and (close < 0 or head.end() <= close):
            self._deltas.begin(json.loads(head[1], strict=False))
            self._state, self._value = "arguments", _ObjectEnd()
            return body[head.end() :]
        if close < 0:
            self._body = body
            return ""
        self._whole(body[:close])
        self._state, self._scan = "after", MarkerScan([OPEN])
        return body[close + len(CLOSE) :]

    def _arguments(self, text: str) -> str:
        end = self._value.find(text)
        if end < 0:
            self._deltas.arguments(text)
            return ""
        self._deltas.arguments(text[:end])
        self._state, self._scan = "tail", MarkerScan([CLOSE])
        return text[end:]

    def _tail(self, text: str) -> str:
        found = self._scan.feed(text)
        if found.marker is None:
            return ""
        self._state, self._scan = "after", MarkerScan([OPEN])
        return found.rest

    def _whole(self, body: str) -> None:
        """A call in another order, or something that is no call."""
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            name = None
        if not isinstance(name, str):
            self._deltas.content(OPEN + body + CLOSE)
            return
        self._deltas.begin(name)
        self._deltas.arguments(arguments if isinstance(arguments, str) else json.dumps(arguments))


class _ObjectEnd:
    """Finds where a JSON object ends, in text that comes in pieces."""

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def find(self, text: str) -> int:
        """The index after the object's last brace; -1 while it is not there."""
        for index, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                self._quoted = char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return -1
