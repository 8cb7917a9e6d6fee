"""Events that a user scripts into a simulation, from a YAML file. Every mistake has its line and field.

    events:
    - {slowdown: decode-0, rank: 3, start: 10, end: 20, factor: 2}
    - {rebalance: decode-0, at: 30}
    - {failure: decode-0, at: 60}

The first key names the kind and its value the instance; times are virtual seconds after the first arrival.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moe_runtime.errors import InputError, PlanError
from moe_runtime.plan.problems import shorten
from moe_runtime.plan.yaml_tree import parse
from moe_runtime.virtual.cluster.events import Failure, Slowdown

KINDS = {
    "slowdown": ("rank", "start", "end", "factor"),
    "failure": ("at",),
    "rebalance": ("at",),
}
LATEST = 1e10  # seconds, beyond all traces
SLOWEST = 1e6  # times: a second of a step is eleven days then


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceAt:
    """Experts of an instance are balanced on the loads of the simulation, and move there."""

    instance: str
    at: float


Scripted = Slowdown | Failure | RebalanceAt


def read_events(path: Path, ranks: Mapping[str, int]) -> list[Scripted]:
    """The events of a file, in its order; `ranks` of every instance. InputError with file, line and field."""
    try:
        tree = parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not text (byte {error.start})") from error
    except PlanError as error:
        raise InputError(str(error)) from error
    for problem in tree.problems:
        raise InputError(f"{path}: {'.'.join(problem.path)} {problem.text}")
    if not isinstance(tree.value, dict) or tree.value.keys() != {"events"}:
        raise InputError(f"{path}: must have the key events, a list, and no other")
    items = tree.value["events"]
    if not isinstance(items, list):
        raise InputError(f"{path}:{tree.lines[('events',)]}: events: must be a list")
    found: list[Scripted] = []
    places = []
    for index, item in enumerate(items):
        lines = [line for key, line in tree.lines.items() if key[:2] == ("events", str(index))]
        line = min(lines, default=tree.lines[("events",)])
        places.append(f"{path}:{line}: events[{index}]")
        found.append(_Item(places[-1], item, ranks).read())
    _require_life(found, places)
    return found


def _require_life(events: list[Scripted], places: list[str]) -> None:
    """Nothing begins on an instance that has failed: it stays away."""
    failed: dict[str, tuple[float, int]] = {}
    for index, event in enumerate(events):
        if isinstance(event, Failure):
            failed[event.instance] = min(failed.get(event.instance, (event.at, index)), (event.at, index))
    for index, event in enumerate(events):
        at, cause = failed.get(event.instance, (LATEST, index))
        begin = event.start if isinstance(event, Slowdown) else event.at
        if index != cause and begin >= at:
            raise InputError(f"{places[index]}: {event.instance} has failed at {at:g}, and stays away")


class _Item:
    """One entry of the list."""

    def __init__(self, where: str, item: Any, ranks: Mapping[str, int]) -> None:
        self._where, self._item, self._ranks = where, item, ranks

    def read(self) -> Scripted:
        kinds = [kind for kind in KINDS if isinstance(self._item, dict) and kind in self._item]
        if len(kinds) != 1:
            self._fail(f"must have one of the keys {', '.join(KINDS)}")
        kind = kinds[0]
        for key in self._item:
            if key not in (kind, *KINDS[kind]):
                self._fail(f"a {kind} has no {key!r}; its keys are {', '.join((kind, *KINDS[kind]))}")
        instance = self._item[kind]
        if not isinstance(instance, str) or instance not in self._ranks:
            self._fail(f"{kind} is {instance!r}: the plan has {', '.join(self._ranks)}")
        if kind == "failure":
            return Failure(instance=instance, at=self._number("at", low=0.0))
        if kind == "rebalance":
            return RebalanceAt(instance=instance, at=self._number("at", low=0.0))
        start = self._number("start", low=0.0)
        return Slowdown(
            instance=instance,
            rank=self._rank(instance),
            start=start,
            end=self._number("end", low=start),
            factor=self._number("factor", low=1.0, high=SLOWEST),
        )

    def _rank(self, instance: str) -> int:
        rank = self._item.get("rank")
        if type(rank) is not int or not 0 <= rank < self._ranks[instance]:
            self._fail(f"rank is {rank!r}, must be from 0 to {self._ranks[instance] - 1}")
        return int(rank)

    def _number(self, key: str, *, low: float, high: float = LATEST) -> float:
        value = self._item.get(key)
        if type(value) not in (int, float) or not low <= value <= high:
            self._fail(f"{key} is {shorten(repr(value))}, must be a number from {low:g} to {high:g}")
        return float(value)

    def _fail(self, text: str) -> NoReturn:
        raise InputError(f"{self._where}: {text}")
