"""Choice: one output on its way from a rank to a client.

Turns the tokens of a `Live` into text, notices stop strings, and says what is new. Knows nothing of
HTTP, or of the form in which a client gets it.
"""

from typing import NamedTuple

from moe_runtime.frontend.live import Live
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.text.output import TextOutput
from moe_runtime.spec.requests import FinishReason

NO_ROOM_SECONDS = 1.0  # until asking again is worth while, where every rank has all it can take


class News(NamedTuple):
    """New text, the tokens it came with (`first` to `last`, the end excluded), and the end if it came.

    A tuple, as one is made for every token.
    """

    text: str
    first: int
    last: int
    finish_reason: str | None


class Choice:
    """Output `index` of a request.

    failure        why there will be no whole answer
    finish_reason  stop or length, once the output is complete
    num_tokens     output tokens so far, those of an end-of-sequence or stop string among them
    """

    __slots__ = ("_text", "failure", "finish_reason", "index", "live", "num_tokens")

    def __init__(self, index: int, live: Live, text: TextOutput) -> None:
        self.index = index
        self.live = live
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.failure: ApiError | None = None
        self._text = text

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def advance(self) -> News | None:
        """What is new since the last call; None for nothing. Sets the end once it has come."""
        live, first = self.live, self.num_tokens
        token_ids, reason = live.token_ids, live.finish_reason
        end = len(token_ids)
        if (first == end and reason is None) or self.ended:
            return None
        # The token that ended the sequence is no text.
        shown = end - 1 if reason == FinishReason.STOP else end
        text, position, feed = "", first, self._text.feed
        while position < shown:
            text += feed(token_ids[position])
            position += 1
            if self._text.stopped:
                return self._end(text, first, position, FinishReason.STOP)
        if reason is None:
            self.num_tokens = position
            return News(text, first, position, None)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            text += self._text.finish()
            return self._end(text, first, end, FinishReason.STOP if self._text.stopped else reason)
        self.num_tokens = position
        self.failure = self.failure or _failure(live)
        return News(text, first, position, None)

    def _end(self, text: str, first: int, last: int, reason: str) -> News:
        self.num_tokens = last
        self.finish_reason = reason
        return News(text, first, last, reason)


def _failure(live: Live) -> ApiError:
    message = live.error or "the request was aborted"
    if live.refused:
        return ApiError(400, message, code="refused")
    if live.no_room:
        return ApiError(429, message, code="overloaded", retry_after=NO_ROOM_SECONDS)
    return ApiError(503 if live.error is None else 500, message, code="aborted")
