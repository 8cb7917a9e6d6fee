"""Limits on JSON schemas: what is too big or too odd to be compiled is refused before it reaches a rank.

Owns sizes and the shapes of regular expressions. Whether a schema can be compiled is for the ranks
to find out; they refuse what they cannot.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from moe_runtime.frontend.openai.errors import invalid

MAX_BYTES = 64 << 10
MAX_DEPTH = 32
MAX_NODES = 4096
MAX_COUNT = 4096  # of minLength, maxItems and their like: each is unrolled
MAX_PATTERN = 512
MAX_REPEAT = 256
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def check_schema(schema: Any, param: str) -> None:
    """ApiError 400, naming `param` and what in it is beyond a limit."""
    size = len(json.dumps(schema))
    if size > MAX_BYTES:
        invalid(param, f"the schema has {size} bytes, at most {MAX_BYTES} are compiled")
    for nodes, (node, depth) in enumerate(_walk(schema), start=1):
        if depth > MAX_DEPTH:
            invalid(param, f"the schema is nested deeper than {MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            invalid(param, f"the schema has more than {MAX_NODES} parts")
        if isinstance(node, dict):
            _check_node(node, param)


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Every object and array in a value, with its depth; no recursion, as the value is a stranger's."""
    stack = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, dict | list):
            yield node, depth
            if depth <= MAX_DEPTH:
                children = node.values() if isinstance(node, dict) else node
                stack += [(child, depth + 1) for child in children]


def _check_node(node: dict[str, Any], param: str) -> None:
    for key in _COUNTS:
        count = node.get(key, 0)
        if isinstance(count, int | float) and count > MAX_COUNT:
            invalid(param, f"{key} is {count}, at most {MAX_COUNT} is compiled")
    kinds = node.get("type")
    # A property may be called `type`; then it is an object.
    for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []:
        if kind not in _TYPES:
            invalid(param, f"{kind!r} is no type of JSON")
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        problem = pattern_problem(pattern)
        if problem:
            invalid(param, f"pattern {pattern[:80]!r}: {problem}")
    patterns = node.get("patternProperties")
    for key in patterns if isinstance(patterns, dict) else ():
        problem = pattern_problem(key)
        if problem:
            invalid(param, f"patternProperties {key[:80]!r}: {problem}")


_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")


def pattern_problem(pattern: str) -> str:
    """Why a regular expression is not compiled, or "": its length, its errors, what its repeats multiply to.

    A repeat without bound inside of a repeat can match in exponentially many ways.
    """
    if len(pattern) > MAX_PATTERN:
        return f"has {len(pattern)} characters, at most {MAX_PATTERN} are compiled"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    # Per open group: (the largest product of repeats in it, whether one of them is unbounded)
    groups: list[tuple[int, bool]] = [(1, False)]
    position, inner = 0, (1, False)
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position, inner = position + 2, (1, False)
        elif char == "[":
            position, inner = _class_end(pattern, position), (1, False)
        elif char == "(":
            groups.append((1, False))
            position += 1
        elif char == ")":
            inner = groups.pop()
            position += 1
        else:
            position, inner = position + 1, (1, False)
        if char == "(":
            continue
        match = _QUANTIFIER.match(pattern, position)
        if match and match[0] != "{}":
            position = match.end()
            count, unbounded = _repeats(match)
            if inner[1] and (unbounded or count > 1):
                return "has a repeat without bound inside of a repeat"
            inner = (inner[0] * count, inner[1] or unbounded)
            if inner[0] > MAX_REPEAT:
                return f"repeats multiply to {inner[0]}, at most {MAX_REPEAT} are compiled"
        most, endless = groups[-1]
        groups[-1] = (max(most, inner[0]), endless or inner[1])
    return ""


def _repeats(match: "re.Match[str]") -> tuple[int, bool]:
    """(how often at most a quantifier unrolls, whether it has no bound)."""
    if match[0] in "*+":
        return 1, True
    if match[0] == "?":
        return 1, False
    low, comma, high = match[1] or "0", match[2], match[3]
    return int(high or low), bool(comma and not high)


def _class_end(pattern: str, start: int) -> int:
    """The index after a character class that begins at `start`; `]` right after the opening is literal."""
    position = start + 1
    if pattern[position : position + 1] == "^":
        position += 1
    if pattern[position : position + 1] == "]":
        position += 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1
