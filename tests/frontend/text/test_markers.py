"""Markers are found whatever pieces the text comes in."""

from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.frontend.text.markers import MarkerScan

WORDS = st.text(alphabet="abc", min_size=1, max_size=4)


def cut(text: str, marks: list[str], sizes: list[int]) -> tuple[str, str | None]:
    """Released text up to the first marker, and the marker, for pieces of the given sizes."""
    scan, out, begin = MarkerScan(marks), "", 0
    for size in [*sizes, len(text)]:
        found = scan.feed(text[begin : begin + size])
        begin += size
        out += found.text
        if found.marker is not None:
            return out, found.marker
    return out + scan.finish(), None


def naive(text: str, marks: list[str]) -> tuple[str, str | None]:
    """Character by character: the first marker to end, the longest of those."""
    for end in range(1, len(text) + 1):
        ended = [m for m in marks if text[:end].endswith(m)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text(alphabet="abc", max_size=30),
    marks=st.lists(WORDS, min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), max_size=30),
)
def test_pieces_do_not_matter(text, marks, sizes):
    assert cut(text, marks, sizes) == naive(text, marks)


@given(text=st.text(alphabet="abc", max_size=30), marks=st.lists(WORDS, min_size=1, max_size=3))
def test_no_more_is_held_back_than_a_marker_could_need(text, marks):
    scan, released = MarkerScan(marks), 0
    for index, char in enumerate(text):
        found = scan.feed(char)
        if found.marker is not None:
            return
        released += len(found.text)
        held = text[released : index + 1]
        assert not held or any(m.startswith(held) and m != held for m in marks)
