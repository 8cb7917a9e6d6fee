"""How the text of a chat output is read, when it is forced, cut short, or everything at once."""

import pytest

from moe_runtime.frontend.openai.answers import AnswerForm, Delta
from moe_runtime.frontend.text.tool_calls import CallDelta
from moe_runtime.frontend.text.tools_hermes import HermesParser


def read(form: AnswerForm, text: str, size: int) -> tuple[str, str, list[CallDelta], bool]:
    """Everything of an output that comes in pieces of `size` characters."""
    answer = form.answer()
    deltas = [answer.feed(text[i : i + size]) for i in range(0, len(text), size)]
    deltas.append(answer.finish())
    calls = [c for d in deltas for c in d.calls]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls, answer.called


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_then_words_then_calls(size):
    form = AnswerForm(reasoning=True, make_parser=HermesParser)
    text = 'I think <tool_call>.</think>Look:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    content, reasoning, calls, called = read(form, text, size)
    assert (content, reasoning, called) == ("Look:", "I think <tool_call>.", True)
    assert [c.name for c in calls if c.name] == ["f"]
    assert "".join(c.arguments for c in calls) == '{"a": 1}'


def test_without_tools_or_reasoning_text_is_content():
    text = "<think>a</think><tool_call>{}</tool_call>"
    assert read(AnswerForm(), text, 2)[0] == text


@pytest.mark.parametrize("size", [1, 1000])
def test_a_named_function_takes_the_whole_output(size):
    content, _, calls, called = read(AnswerForm(form="named", name="f"), '{"a": "<think>"}', size)
    assert (content, called) == ("", False)
    assert [c.name for c in calls if c.name] == ["f"]
    assert "".join(c.arguments for c in calls) == '{"a": "<think>"}'


def test_required_calls_are_known_at_the_end():
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    _, _, calls, called = read(AnswerForm(form="required"), text, 5)
    assert called
    assert [(c.index, c.name, c.arguments) for c in calls] == [(0, "f", '{"a": 1}'), (1, "g", "{}")]


@pytest.mark.parametrize("text", ['[{"name": "f", "par', "", "[1]", '{"name": 1}'])
def test_required_calls_that_were_cut_short_are_shown_as_they_are(text):
    content, _, calls, called = read(AnswerForm(form="required"), text, 4)
    assert (content, calls, called) == (text, [], False)


def test_nothing_is_falsy():
    assert not Delta()
    assert Delta(calls=(CallDelta(index=0, arguments="x"),))
