"""Tool calls of each format, whole and in any pieces."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.frontend.text.tool_calls import ToolParser
from moe_runtime.frontend.text.tool_parsers import parser_for
from moe_runtime.frontend.text.tools_deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEP,
    DeepSeekParser,
)
from moe_runtime.frontend.text.tools_hermes import HermesParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A whole call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A whole output."""

    content: str
    calls: tuple[Call, ...]


def collect(parser: ToolParser, text: str) -> Parsed:
    """Everything at once."""
    names: list[str] = []
    arguments: list[str] = []
    content = ""
    for delta in (parser.feed(text), parser.finish()):
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                names.append(call.name)
                arguments.append("")
            arguments[call.index] += call.arguments
    calls = tuple(Call(name=n, arguments=a) for n, a in zip(names, arguments, strict=True))
    return Parsed(content=content, calls=calls)


V3_TEMPLATE = f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}name\n```json\n"
V31_TEMPLATE = f"{CALLS_BEGIN}{CALL_BEGIN}name{SEP}"
ARGUMENTS = [
    {"city": "東京 😀", "unit": "C"},
    {"nested": {"list": [1, {"brace": '}"{'}], "tag": "</tool_call"}, "quote": 'a\\"b'},
    {},
]
NAMES = ["get_weather", "search", "now"]


def v3(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEP}{arguments}{CALL_END}"


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def deepseek_output(call, calls) -> str:
    return "Let me see. " + CALLS_BEGIN + "\n".join(call(n, a) for n, a in calls) + CALLS_END


def hermes_output(call, calls) -> str:
    return "Let me see. " + "\n".join(call(n, a) for n, a in calls)


FORMATS: dict[str, tuple[Callable[[], ToolParser], Callable, Callable]] = {
    "v3": (lambda: DeepSeekParser(fenced=True), v3, deepseek_output),
    "v3.1": (lambda: DeepSeekParser(fenced=False), v31, deepseek_output),
    "hermes": (HermesParser, hermes, hermes_output),
}
CALLS = [(n, json.dumps(a, ensure_ascii=False)) for n, a in zip(NAMES, ARGUMENTS, strict=True)]


def in_pieces(parser, text: str, sizes: list[int]) -> Parsed:
    content, begin = "", 0
    names: list[str] = []
    arguments: list[str] = []
    deltas = []
    for size in [*sizes, len(text)]:
        deltas.append(parser.feed(text[begin : begin + size]))
        begin += size
    for delta in [*deltas, parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(names)
                names.append(call.name)
                arguments.append("")
            arguments[call.index] += call.arguments
    return Parsed(
        content=content, calls=tuple(Call(name=n, arguments=a) for n, a in zip(names, arguments, strict=True))
    )


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("count", [1, 3])
@given(sizes=st.lists(st.integers(1, 40), max_size=60))
@settings(max_examples=25)
def test_calls_are_read_whatever_the_pieces(kind, count, sizes):
    make, call, output = FORMATS[kind]
    text = output(call, CALLS[:count])
    expected = Parsed(
        content="Let me see. ", calls=tuple(Call(name=n, arguments=a) for n, a in CALLS[:count])
    )
    assert collect(make(), text) == expected
    assert in_pieces(make(), text, sizes) == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_arguments_are_passed_on_while_they_come(kind):
    make, call, output = FORMATS[kind]
    text = output(call, CALLS[:1])
    middle = text.index('"city": "') + 9
    delta = make().feed(text[:middle])
    assert delta.calls[0].name == "get_weather"
    assert "".join(c.arguments for c in delta.calls) == '{"city": "'


@pytest.mark.parametrize("kind", FORMATS)
@given(
    text=st.text(alphabet='<tool_cal>/\n{"name: argumentsxyz}', max_size=60),
    sizes=st.lists(st.integers(1, 9)),
)
def test_any_text_is_read_the_same_in_pieces(kind, text, sizes):
    make = FORMATS[kind][0]
    assert in_pieces(make(), text, sizes) == collect(make(), text)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_output_without_calls_is_content(kind):
    text = "a < b, <tool and <\uff5ctool\u2581calls"
    assert collect(FORMATS[kind][0](), text) == Parsed(content=text, calls=())


def test_hermes_in_another_order_and_with_quoted_arguments():
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    text += '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>'
    calls = (Call(name="f", arguments='{"a": 1}'), Call(name="g", arguments="{}"))
    assert collect(HermesParser(), text) == Parsed(content="", calls=calls)


@pytest.mark.parametrize("body", ["not JSON", '{"arguments": {}}', "[1]", '{"name": 3, "arguments": 4}'])
def test_hermes_tags_around_something_else_are_content(body):
    text = f"<tool_call>{body}</tool_call>"
    assert collect(HermesParser(), text) == Parsed(content=text, calls=())


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (V3_TEMPLATE, DeepSeekParser),
        (V31_TEMPLATE, DeepSeekParser),
        ("<tool_call>\n{{ call }}", HermesParser),
        ("<tool_call>\n<function={{ name }}>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_names_the_format(template, parser):
    made = parser_for(template)
    assert (None if made is None else type(made())) is parser
    if made is not None and template in (V3_TEMPLATE, V31_TEMPLATE):
        call = v3 if template == V3_TEMPLATE else v31
        assert collect(made(), CALLS_BEGIN + call("f", "{}") + CALLS_END).calls == (
            Call(name="f", arguments="{}"),
        )
