"""Log probabilities in the two forms of the API.

Tokens are shown as text; bytes that are no whole character become U+FFFD there, and the chat form
lists them as well.
"""

from collections.abc import Sequence
from typing import Any

from moe_runtime.engine.messages import Logprobs
from moe_runtime.frontend.text.vocabulary import Vocabulary

_LEAST = -9999.0  # JSON has no infinity


class LogprobFormat:
    """Formats tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs], offset: int
    ) -> tuple[dict[str, Any], int]:
        """The `logprobs` of a completion's text, and the offset after it; `offset`: where its text begins."""
        tokens = [self._text(i) for i in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(p.chosen) for p in logprobs],
            "top_logprobs": [
                {self._text(i): _finite(value) for i, value in zip(p.top_ids, p.top, strict=True)}
                for p in logprobs
            ],
            "text_offset": offsets,
        }, offset

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
        """The `logprobs` of a chat choice."""
        return {
            "content": [
                {
                    **self._entry(token, p.chosen),
                    "top_logprobs": [
                        self._entry(i, value) for i, value in zip(p.top_ids, p.top, strict=True)
                    ],
                }
                for token, p in zip(token_ids, logprobs, strict=True)
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.shown(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    def _text(self, token_id: int) -> str:
        return self._vocabulary.shown(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)
