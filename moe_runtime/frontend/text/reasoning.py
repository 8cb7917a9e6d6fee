"""ReasoningSplit: what a model thinks, `<think>...</think>`, apart from what it answers.

Owns the two tags. Only the tags are removed: reasoning and answer keep every other character.
"""

from moe_runtime.frontend.text.markers import MarkerScan

OPEN, CLOSE = "<think>", "</think>"


def thinks(template: str) -> bool:
    """Whether a chat template belongs to a model that reasons."""
    return CLOSE in template


class ReasoningSplit:
    """Splits one output. `inside`: the prompt has opened the tag already.

    A tag is only opened at the beginning of the output, spaces aside, and only once.
    """

    __slots__ = ("_begun", "_close", "_state")

    def __init__(self, *, inside: bool) -> None:
        self._state = "inside" if inside else "before"
        self._begun = ""
        self._close = MarkerScan([CLOSE])

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that a piece of text makes certain."""
        if self._state == "before":
            text = self._opened(text)
        if self._state == "inside":
            found = self._close.feed(text)
            if found.marker is None:
                return found.text, ""
            self._state = "after"
            return found.text, found.rest
        return "", text

    def finish(self) -> tuple[str, str]:
        """What was held back, now that nothing more comes."""
        begun, self._begun = self._begun, ""
        return self._close.finish(), begun

    def _opened(self, text: str) -> str:
        """Decide whether the output begins with the tag; returns the text to go on with."""
        text = self._begun + text
        stripped = text.lstrip()
        if stripped.startswith(OPEN):
            self._state, self._begun = "inside", ""
            return stripped[len(OPEN) :]
        if OPEN.startswith(stripped):
            self._begun = text
            return ""
        self._state, self._begun = "after", ""
        return text
