"""Detokenizer: token ids to text, one at a time, never half a character.

Owns UTF-8 across token borders. Joined pieces equal the text of all ids decoded at once.
"""

import codecs

from moe_runtime.frontend.text.vocabulary import Vocabulary

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one output, in constant time per token.

    Bytes that begin a character wait for the rest of it; bytes that cannot become one turn into
    U+FFFD, one per maximal subpart (Unicode 15, section 3.9), as in `tokenizers`.
    """

    __slots__ = ("_decode", "_pieces", "_size", "_strip")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.text_bytes
        self._size = len(vocabulary.text_bytes)
        self._decode = _DECODER("replace").decode
        self._strip = vocabulary.leading_spaces

    def feed(self, token_id: int) -> str:
        """The text that is certain once `token_id` is there; ids without a token add none."""
        text = self._decode(self._pieces[token_id]) if token_id < self._size else ""
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        """What the end makes certain: a character that was begun becomes U+FFFD."""
        return self._decode(b"", True)

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text
