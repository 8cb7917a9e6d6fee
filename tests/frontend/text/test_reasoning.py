"""What is thought and what is answered, whatever pieces the output comes in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.frontend.text.reasoning import ReasoningSplit

CASES = {
    "<think>a\nb</think>\n\nc": (False, "a\nb", "\n\nc"),
    " \n<think>a</think>c": (False, "a", "c"),
    "a\nb</think>c": (True, "a\nb", "c"),
    "no tags at all": (False, "", "no tags at all"),
    "a <think>b</think>": (False, "", "a <think>b</think>"),
    "<thin ice": (False, "", "<thin ice"),
    "<think>never ends </thin": (False, "never ends </thin", ""),
    "  ": (False, "", "  "),
    "<think>a</think>b</think>c": (False, "a", "b</think>c"),
    "<think></think>": (False, "", ""),
}


@pytest.mark.parametrize("text", CASES)
@given(sizes=st.lists(st.integers(1, 6), max_size=30))
@settings(max_examples=25)
def test_split(text, sizes):
    inside, reasoning, answer = CASES[text]
    split, got, begin = ReasoningSplit(inside=inside), ["", ""], 0
    for size in [*sizes, len(text)]:
        thought, said = split.feed(text[begin : begin + size])
        begin += size
        got = [got[0] + thought, got[1] + said]
    thought, said = split.finish()
    assert (got[0] + thought, got[1] + said) == (reasoning, answer)
