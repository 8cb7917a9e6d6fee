"""A problem of a plan as a value, and how several become one PlanError.

Owns how keys and values are printed, and which name a wrong one may stand for; knows nothing of any
particular rule.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from moe_runtime.errors import PlanError

Path = tuple[str, ...]

MAX_SHOWN = 50
_PLAIN = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_LONGEST = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`path` is the key, `text` what is wrong with `value`, `hint` what would work."""

    path: Path
    text: str
    value: object = None
    hint: str = ""


def dotted(path: Path) -> str:
    """The key as a user writes it; odd parts (spaces, dots, control characters) are quoted."""
    return ".".join(p if _PLAIN.fullmatch(p) else repr(shorten(p)) for p in path)


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that another one is the beginning of, or is most like; None if there is none."""
    word, names = name[:80].lower(), list(known)
    begun = sorted(
        (k for k in names if word and k.startswith(word)), key=lambda k: not k.startswith(f"{word}-")
    )
    near = begun or get_close_matches(word, names, n=1)
    return near[0] if near else None


def shown(value: object) -> object:
    """The value, or a short stand-in where printing all of it would drown the message."""
    if isinstance(value, str):
        return shorten(value)
    if isinstance(value, bool):
        return _Words(str(value).lower())
    if isinstance(value, dict):
        return {} if not value else _Words("a mapping")
    if isinstance(value, list):
        return [] if not value else _Words("a list")
    if isinstance(value, int) and value.bit_length() > 64:
        return _Words("a number beyond 64 bits")
    return value


class _Words(str):
    """Text that stands for a value and is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def raise_problems(problems: Sequence[Problem], where: Callable[[Path], str]) -> None:
    """PlanError with one line per problem, each with `where` its key was set; nothing if none."""
    errors = []
    for p in problems[:MAX_SHOWN]:
        place = where(p.path)
        text = f"{p.text} ({place})" if place else p.text
        error = PlanError(dotted(p.path) or "plan", text, value=shown(p.value), hint=p.hint)
        error.value = p.value
        errors.append(error)
    if len(problems) > MAX_SHOWN:
        errors.append(PlanError("plan", f"and {len(problems) - MAX_SHOWN} more problems"))
    if errors:
        raise errors[0] if len(errors) == 1 else PlanError.together(errors)
