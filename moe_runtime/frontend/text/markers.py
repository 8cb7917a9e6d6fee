"""Markers: strings looked for in a text that comes in pieces.

Owns the holding back of text that may be the beginning of a marker. The result does not depend on
where the pieces end.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """What a piece made certain: `text` before any marker; the marker, if one ended; what follows it.

    A tuple, as one is made for every token.
    """

    text: str
    marker: str | None = None
    rest: str = ""


class MarkerScan:
    """Looks for the marker that ends first; of those that end together, the longest.

    `feed` holds back the longest end of the text that is the beginning of some marker. After a
    marker was found the scan starts anew with what it is fed next.
    """

    __slots__ = ("_held", "_markers", "_prefixes")

    def __init__(self, markers: Sequence[str]) -> None:
        assert all(markers), "an empty marker is everywhere"
        self._markers = tuple(markers)
        prefixes = {m[:n] for m in markers for n in range(1, len(m))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))
        self._held = ""

    def feed(self, piece: str) -> Found:
        text = self._held + piece if self._held else piece
        first: tuple[int, int, str] | None = None
        for marker in self._markers:
            if (start := text.find(marker)) >= 0:
                candidate = (start + len(marker), start, marker)
                if first is None or candidate < first:
                    first = candidate
        if first is not None:
            end, start, marker = first
            self._held = ""
            return Found(text[:start], marker, text[end:])
        self._held = ""
        if self._prefixes and text.endswith(self._prefixes):
            self._held = next(p for p in self._prefixes if text.endswith(p))
            return Found(text[: -len(self._held)])
        return Found(text)

    def finish(self) -> str:
        """The text held back: it was no marker after all."""
        held, self._held = self._held, ""
        return held
