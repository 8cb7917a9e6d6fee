"""Pydantic's errors -> problems in the words of the plan: what was expected and what would work."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from moe_runtime.plan.keys import ANY_DEPLOYMENT, DEPLOYMENTS, Key, key_of
from moe_runtime.plan.problems import Path, Problem
from moe_runtime.plan.yaml_tree import plain_scalar

_EXAMPLES: Mapping[Path, str] = MappingProxyType(
    {
        ("model",): "for example model: {path: ../checkpoints/small-deepseek-v3}",
        ("model", "path"): "for example path: ../checkpoints/small-deepseek-v3",
        (DEPLOYMENTS,): "for example deployments: {unified: {expert_parallel: 1}}",
    }
)

_SYNONYMS: Mapping[str, str] = MappingProxyType({"gpu": "cuda", "fp8": "float8_e4m3"})
"""Words for values of ours where spelling does not show the way."""


def invalid_values(error: ValidationError, values: dict[str, Any]) -> Iterator[Problem]:
    """One problem per key; the alternatives of a union have an error each."""
    details: dict[Path, list[Any]] = {}
    for detail in error.errors(include_url=False):
        details.setdefault(_key_path(detail["loc"]), []).append(detail)
    for path, found in details.items():
        key = key_of(path)
        if key is None:
            yield Problem(path=path, text=str(found[0]["msg"]), value=found[0]["input"])
        elif found[0]["type"] == "missing":
            yield Problem(path=path, text=f"is missing: give {key.expected}", hint=_EXAMPLES.get(path, ""))
        else:
            value = _value_at(path, values)
            hint = _hint(key, value, _bounds(found))
            yield Problem(path=path, text=f"must be {key.expected}", value=value, hint=hint)


def _key_path(loc: tuple[int | str, ...]) -> Path:
    """The longest known key that `loc` starts with: the rest are pydantic's tags of unions."""
    path = tuple(str(part) for part in loc)
    while path and key_of(path) is None:
        path = path[:-1]
    return path


def _value_at(path: Path, values: Any) -> Any:
    for part in path:
        values = values[part]
    return values


def _bounds(details: Sequence[Any]) -> list[object]:
    """The bounds that a number broke."""
    contexts = [d.get("ctx", {}) for d in details]
    return [context[name] for context in contexts for name in ("ge", "le") if name in context]


def _hint(key: Key, value: object, bounds: Sequence[object]) -> str:
    """Something the key accepts, as near to what was given as can be told."""
    if isinstance(value, str):
        plain = plain_scalar(value)
        if not isinstance(plain, str) and key.accepts(plain):
            return f"write {value} without quotes"
        word = value[:80].lower()
        near = get_close_matches(_SYNONYMS.get(word, word), key.words, n=1, cutoff=0.5)
        if near:
            return f"did you mean {near[0]}?"
    if isinstance(value, float) and value.is_integer() and key.accepts(int(value)):
        return f"write {int(value)}"
    working = next((b for b in bounds if key.accepts(b)), None)
    if working is not None:
        return f"{working} works"
    if key.section is not None:
        return (
            f"write its keys under {key.path[-1]}:"
            if key.path[-1] != ANY_DEPLOYMENT
            else "write its keys under it"
        )
    default = key.default
    if isinstance(default, str | int | float):
        return f"the default {str(default).lower() if isinstance(default, bool) else default} works"
    return _EXAMPLES.get(key.path, "")
