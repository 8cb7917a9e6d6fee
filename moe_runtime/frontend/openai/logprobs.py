"""Log probabilities in the two forms of the API.

Tokens are shown as text; bytes that are no whole character become U+FFFD there, and the chat form
lists them as well.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moe_runtime.engine.messages import Logprobs, PromptLogprobs
from moe_runtime.frontend.text.detokenizer import Detokenizer
from moe_runtime.frontend.text.vocabulary import Vocabulary

_LEAST = -9999.0  # JSON has no infinity


class TextOffsets:
    """Where the tokens of a text begin in it, in characters, one after the other.

    A token that begins inside of a character begins where the character does.
    """

    def __init__(self, vocabulary: Vocabulary, start: int = 0) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._at = start

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._detokenizer.feed(token_id))
        return at


def each_of(prompt: PromptLogprobs) -> list[Logprobs]:
    """A prompt's logprobs, one by one: those of its second token first."""
    chosen = np.frombuffer(prompt.chosen, np.float32).tolist()
    ids = np.frombuffer(prompt.top_ids, np.int32).reshape(len(chosen), prompt.k).tolist()
    top = np.frombuffer(prompt.top, np.float32).reshape(len(chosen), prompt.k).tolist()
    return [Logprobs(*one) for one in zip(chosen, ids, top, strict=True)]


class LogprobFormat:
    """Formats tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def offsets(self, start: int = 0, *, spelled: bool = False) -> TextOffsets:
        """Offsets of tokens in a text from `start` on. `spelled`: special tokens are part of it."""
        known = self._vocabulary
        return TextOffsets(replace(known, text_bytes=known.shown_bytes) if spelled else known, start)

    def completion(
        self, token_ids: Sequence[int], logprobs: Iterable[Logprobs | None], offsets: TextOffsets
    ) -> dict[str, Any]:
        """The `logprobs` of a part of a completion's text. None of a token that nothing is before."""
        chosen = [(None, None) if p is None else (_finite(p.chosen), self._best(p)) for p in logprobs]
        return {
            "tokens": [self._text(i) for i in token_ids],
            "token_logprobs": [value for value, _ in chosen],
            "top_logprobs": [best for _, best in chosen],
            "text_offset": [offsets.next(i) for i in token_ids],
        }

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

    def _best(self, p: Logprobs) -> dict[str, float]:
        """By text; of tokens that look alike the best one."""
        best: dict[str, float] = {}
        for token_id, value in zip(p.top_ids, p.top, strict=True):
            best.setdefault(self._text(token_id), _finite(value))
        return best

    def _text(self, token_id: int) -> str:
        return self._vocabulary.shown(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)
