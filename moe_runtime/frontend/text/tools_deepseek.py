"""Tool calls as DeepSeek-V3, R1 (fenced) and V3.1 (bare) write them.

    V3    <CALLS_BEGIN> { <CALL_BEGIN>function<SEP>NAME\\n```json\\nARGUMENTS\\n```<CALL_END> } <CALLS_END>
    V3.1  <CALLS_BEGIN> { <CALL_BEGIN>NAME<SEP>ARGUMENTS<CALL_END> } <CALLS_END>

Source: the chat templates in the models' `tokenizer_config.json`.
"""

from moe_runtime.frontend.text.markers import MarkerScan
from moe_runtime.frontend.text.tool_calls import Deltas, ToolDelta

CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"
_FENCE, _FENCE_END = "\n```json\n", "\n```"


class DeepSeekParser:
    """`fenced`: the V3 form. Text between the calls is dropped, text around all of them is content."""

    def __init__(self, *, fenced: bool) -> None:
        self._fenced = fenced
        self._deltas = Deltas()
        self._state = "content"
        self._scan = MarkerScan([CALLS_BEGIN])
        self._head = ""

    @property
    def num_calls(self) -> int:
        return self._deltas.count

    def feed(self, text: str) -> ToolDelta:
        marker: str | None = ""
        while marker is not None:
            found = self._scan.feed(text)
            self._text(found.text)
            marker, text = found.marker, found.rest
            if marker is not None:
                self._marker(marker)
        return self._deltas.take()

    def finish(self) -> ToolDelta:
        self._text(self._scan.finish())
        if self._state in ("type", "head"):  # a call without a name is no call
            self._deltas.content(self._head)
        return self._deltas.take()

    def _text(self, text: str) -> None:
        match self._state:
            case "content":
                self._deltas.content(text)
            case "type" | "head":
                self._head += text
            case "arguments":
                self._deltas.arguments(text)

    def _marker(self, marker: str) -> None:
        match self._state, marker:
            case "content", _:
                self._enter("between")
            case "between", m if m == CALLS_END:
                self._enter("content")
            case "between", _:
                self._head = ""
                self._enter("type" if self._fenced else "head")
            case "type", _:
                self._head = ""
                self._enter("head")
            case "head", _:
                self._deltas.begin(self._head.strip())
                self._head = ""
                self._enter("arguments")
            case "arguments", _:
                self._enter("between")

    def _enter(self, state: str) -> None:
        self._state = state
        self._scan = MarkerScan(self._awaited(state))

    def _awaited(self, state: str) -> list[str]:
        """The markers that end a state."""
        return {
            "content": [CALLS_BEGIN],
            "between": [CALL_BEGIN, CALLS_END],
            "type": [SEP],
            "head": [_FENCE if self._fenced else SEP],
            "arguments": [_FENCE_END + CALL_END, CALL_END] if self._fenced else [CALL_END],
        }[state]
