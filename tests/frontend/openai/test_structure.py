"""Which JSON schemas and regular expressions are let through to the ranks."""

import pytest

from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.openai.structure import check_schema, pattern_problem

HARMLESS = [
    "",
    "^[a-z]+@[a-z]+\\.com$",
    "(\\d{3}-)?\\d{4}",
    "^(?:[A-Z]{2,5}){1,3}$",
    "[]*+]+",
    "[^]{9999}]*",
    "\\(a+\\)+",
    "a{,3}",
    "(a|b)*c{200}",
    "(x{2}){3}",
    "a{}",
]
HARMFUL = {
    "(a+)+$": "inside of a repeat",
    "((a*)b)*": "inside of a repeat",
    "(x+x+)+y": "inside of a repeat",
    "(a{2,})*": "inside of a repeat",
    "((a+)?)*": "inside of a repeat",
    "(a*){2}": "inside of a repeat",
    "a{1000}": "multiply to 1000",
    "((a{20}){20}){20}": "multiply to 400",
    "(b{30}|c){10}": "multiply to 300",
    "(": "is no regular expression",
    "a" * 600: "at most 512",
}


@pytest.mark.parametrize("pattern", HARMLESS)
def test_harmless_patterns_pass(pattern):
    assert pattern_problem(pattern) == ""


@pytest.mark.parametrize("pattern", HARMFUL)
def test_harmful_patterns_are_named(pattern):
    assert HARMFUL[pattern] in pattern_problem(pattern)


def nested(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (nested(40), "deeper than 32"),
        ({"enum": ["x" * 1000] * 100}, "bytes"),
        ({"allOf": [{}] * 5000}, "more than 4096 parts"),
        ({"type": "text"}, "'text' is no type"),
        ({"type": ["string", "text"]}, "'text' is no type"),
        ({"items": {"maxItems": 1e9}}, "maxItems"),
        ({"patternProperties": {"(a+)+": {}}}, "patternProperties"),
        ({"properties": {"a": {"anyOf": [{"pattern": "(a+)+"}]}}}, "pattern '(a+)+'"),
    ],
)
def test_schemas_beyond_a_limit_are_named(schema, problem):
    with pytest.raises(ApiError) as caught:
        check_schema(schema, "the field")
    assert problem in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "the field")


def test_ordinary_schemas_pass():
    check_schema(nested(30), "x")
    check_schema({"properties": {"type": {"type": "string"}, "pattern": {"maxLength": 5}}}, "x")
    check_schema({}, "x")
