"""TextOutput: one output's tokens to its text, ended by a stop string if one appears.

Joins detokenizer and stop strings. What the text means (reasoning, tool calls) is decided elsewhere.
"""

from collections.abc import Sequence

from moe_runtime.frontend.text.detokenizer import Detokenizer
from moe_runtime.frontend.text.markers import MarkerScan
from moe_runtime.frontend.text.vocabulary import Vocabulary


class TextOutput:
    """Text of one output. `stopped` once a stop string was met; it is not part of the text.

    Stop strings are looked for in text of the tokens after the first `min_tokens`.
    """

    __slots__ = ("_detokenizer", "_left", "_scan", "stopped")

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._scan = MarkerScan(stop) if stop else None
        self._left = min_tokens
        self.stopped = False

    def feed(self, token_id: int) -> str:
        """The text that `token_id` makes certain; what may begin a stop string is held back."""
        text = self._detokenizer.feed(token_id)
        if self._scan is None:
            return text
        if self._left > 0:
            self._left -= 1
            return text
        return self._checked(text)

    def finish(self) -> str:
        """The rest of the text: nothing more will come."""
        text = self._detokenizer.finish()
        if self._scan is None or self.stopped:
            return "" if self.stopped else text
        text = self._checked(text)
        return text if self.stopped else text + self._scan.finish()

    def _checked(self, text: str) -> str:
        assert self._scan is not None
        found = self._scan.feed(text)
        self.stopped = found.marker is not None
        return found.text
