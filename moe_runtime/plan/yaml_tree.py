"""YAML text -> plain values with the line of every key. Nothing is coerced.

Owns the YAML subset of a plan: mappings, lists and scalars of the YAML 1.2 core schema, so that
`yes` and `1:30` stay text. Aliases are followed; tags and merge keys are refused. Knows no keys.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from moe_runtime.errors import PlanError
from moe_runtime.plan.problems import Path, Problem, shorten

MAX_DEPTH = 16
MAX_NODES = 10_000
"""Far beyond any plan; they bound cyclic aliases and aliases of aliases."""

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """The composer of PyYAML with the scalar rules of YAML 1.2's core schema."""

    yaml_implicit_resolvers = {}


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass(slots=True)
class Tree:
    """`value` of the document; `lines` of every key, 1-based; problems that are not syntax."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0


def parse(text: str, name: str) -> Tree:
    """The values of one YAML document. PlanError with `name:line:column` if it is not YAML."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        words = " ".join(w for w in (error.context, error.problem) if w)
        raise PlanError(place, f"is not valid YAML: {one_line(words)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        raise PlanError(f"{name}:{line}:{column}", "is not valid YAML: a control character") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise PlanError(name, "is not valid YAML: nested too deeply or malformed") from error
    tree = Tree()
    if node is not None:
        tree.value = _value(node, (), 0, tree, name)
    return tree


def plain_scalar(text: str) -> Any:
    """What `text` would be as an unquoted scalar; itself if it is none."""
    try:
        value = parse(text, "").value
    except PlanError:
        return text
    return text if value is None or isinstance(value, dict | list) else value


def one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())[:200])


def _place(node: yaml.Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _value(node: yaml.Node, path: Path, depth: int, tree: Tree, name: str) -> Any:
    tree.nodes += 1
    if depth > MAX_DEPTH or tree.nodes > MAX_NODES:
        limit = f"more than {MAX_DEPTH} levels" if depth > MAX_DEPTH else f"more than {MAX_NODES} values"
        raise PlanError(_place(node, name), f"has {limit}", hint="check for anchors that contain themselves")
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, depth, tree, name)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_value(item, (*path, str(i)), depth + 1, tree, name) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, name)
    raise PlanError(_place(node, name), f"tag {shorten(str(node.tag))!r} is not allowed in a plan")


def _mapping(node: yaml.MappingNode, path: Path, depth: int, tree: Tree, name: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
            shown = shorten(str(key_node.value)) if isinstance(key_node, yaml.ScalarNode) else "a collection"
            tree.problems.append(
                Problem(path=path, text=f"key {shown!r} in line {line} is not text", hint="quote it")
            )
            continue
        key = (*path, key_node.value)
        if key_node.value in result:
            first = tree.lines[key]
            tree.problems.append(
                Problem(path=key, text=f"is given twice, in lines {first} and {line}", hint="delete one")
            )
            continue
        tree.lines[key] = line
        result[key_node.value] = _value(value_node, key, depth + 1, tree, name)
    return result


def _scalar(node: yaml.ScalarNode, name: str) -> Any:
    text = node.value
    try:
        match node.tag.removeprefix(_TAG):
            case "null":
                return None
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "int":
                return _integer(text)
            case "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            case "str":
                return text
    except (ValueError, KeyError, OverflowError) as error:
        kind = {"int": "an integer", "float": "a number", "bool": "true or false"}
        raise PlanError(
            _place(node, name), f"{shorten(text)!r} is not {kind[node.tag.removeprefix(_TAG)]}"
        ) from error
    raise PlanError(_place(node, name), f"tag {shorten(node.tag)!r} is not allowed in a plan")


def _integer(text: str) -> int:
    if text.startswith("0o"):
        return int(text[2:], 8)
    if text.startswith("0x"):
        return int(text[2:], 16)
    return int(text, 10)
