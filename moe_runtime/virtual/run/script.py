"""Events that a user scripts into a simulation, from a YAML file. Every mistake has its line and field.

    events:
    - {slowdown: decode-0, rank: 3, start: 10, end: 20, factor: 2}
    - {rebalance: decode-0, at: 30}
    - {failure: decode-0, at: 60, restart_after: 20}
    - {load_shift: all, at: 90, to: topic:1, mix: 0.5}
    - {load_drift: decode, start: 90, end: 300, every: 10, noise: 0.2, correlation: 0.9}

The first key names the kind and its value the instance, of loads the deployment or all; times are virtual
seconds after the first arrival.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moe_runtime.errors import InputError, PlanError
from moe_runtime.plan.problems import nearest, shorten
from moe_runtime.plan.yaml_tree import parse
from moe_runtime.virtual.cluster.events import Rebalance, Slowdown
from moe_runtime.virtual.run.course import ALL, ENDINGS, TARGETS, LoadDrift, LoadShift

KINDS = {
    "slowdown": ("rank", "start", "end", "factor"),
    "failure": ("at", "restart_after"),
    "rebalance": ("at",),
    "load_shift": ("at", "to", "mix"),
    "load_drift": ("start", "end", "every", "noise", "correlation", "seed"),
}
LATEST = 1e10  # seconds, beyond all traces
SLOWEST = 1e6  # times: a second of a step is eleven days then
LARGEST_NOISE = 3.0
MOST_WINDOWS = 10_000  # of a drift: 58 layers of 256 experts are 1.2 GB then, as the report draws from all


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureAt:
    """An instance dies, and is started anew `restart_after` seconds later; None: never."""

    instance: str
    at: float
    restart_after: float | None = None


Scripted = Slowdown | FailureAt | Rebalance | LoadShift | LoadDrift


def read_events(path: Path, ranks: Mapping[str, int]) -> list[Scripted]:
    """The events of a file, in its order; `ranks` of every instance. InputError with file, line and field.

    Files that it names are looked for in its folder.
    """
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
        found.append(_Item(places[-1], item, ranks, path.parent).read())
    _require_life(found, places)
    return found


def _require_life(events: list[Scripted], places: list[str]) -> None:
    """Nothing begins on an instance that has failed and is not yet started anew."""
    failures = [(index, e) for index, e in enumerate(events) if isinstance(e, FailureAt)]
    for index, event in enumerate(events):
        if isinstance(event, LoadShift | LoadDrift):
            continue
        begin = event.start if isinstance(event, Slowdown) else event.at
        for cause, failure in failures:
            first = isinstance(event, FailureAt) and (begin, index) <= (failure.at, cause)
            after = LATEST if failure.restart_after is None else failure.restart_after
            down = failure.at <= begin < failure.at + after
            if event.instance == failure.instance and down and not first:
                stays = (
                    "stays away" if failure.restart_after is None else f"is started anew {after:g} s later"
                )
                raise InputError(
                    f"{places[index]}: {event.instance} has failed at {failure.at:g}, and {stays}"
                )


class _Item:
    """One entry of the list."""

    def __init__(self, where: str, item: Any, ranks: Mapping[str, int], folder: Path) -> None:
        self._where, self._item, self._ranks, self._folder = where, item, ranks, folder

    def read(self) -> Scripted:
        kinds = [kind for kind in KINDS if isinstance(self._item, dict) and kind in self._item]
        if len(kinds) != 1:
            self._fail(f"must have one of the keys {', '.join(KINDS)}{self._meant(kinds)}")
        kind = kinds[0]
        for key in self._item:
            if key not in (kind, *KINDS[kind]):
                self._fail(f"a {kind} has no {key!r}; its keys are {', '.join((kind, *KINDS[kind]))}")
        if kind == "load_shift":
            return self._shift(self._name(kind, self._deployments()))
        if kind == "load_drift":
            return self._drift(self._name(kind, self._deployments()))
        instance = self._name(kind, tuple(self._ranks))
        if kind == "failure":
            after = None if "restart_after" not in self._item else self._number("restart_after", low=0.0)
            return FailureAt(instance=instance, at=self._number("at", low=0.0), restart_after=after)
        if kind == "rebalance":
            return Rebalance(instance=instance, at=self._number("at", low=0.0))
        start = self._number("start", low=0.0)
        return Slowdown(
            instance=instance,
            rank=self._rank(instance),
            start=start,
            end=self._number("end", low=start),
            factor=self._number("factor", low=1.0, high=SLOWEST),
        )

    def _meant(self, kinds: list[str]) -> str:
        """What to say of a first key that is like a kind."""
        if kinds or not isinstance(self._item, dict) or not self._item:
            return ""
        first = next(iter(self._item))
        near = nearest(first, KINDS)
        return "" if near is None else f"; did you mean {near} by {shorten(repr(first))}?"

    def _name(self, kind: str, names: tuple[str, ...]) -> str:
        name = self._item[kind]
        if not isinstance(name, str) or name not in names:
            self._fail(f"{kind} is {name!r}: the plan has {', '.join(names)}")
        return str(name)

    def _deployments(self) -> tuple[str, ...]:
        return (ALL, *dict.fromkeys(name.rpartition("-")[0] for name in self._ranks))

    def _shift(self, deployment: str) -> LoadShift:
        to = self._item.get("to")
        if not isinstance(to, str) or not to:
            self._fail(f"to is {shorten(repr(to))}, must be {TARGETS}")
        if Path(to).suffix.lower() in ENDINGS:
            to = str(self._folder / to)
        return LoadShift(
            deployment=deployment,
            at=self._number("at", low=0.0),
            to=to,
            mix=self._number("mix", low=0.0, high=1.0) if "mix" in self._item else 1.0,
            where=self._where,
        )

    def _drift(self, deployment: str) -> LoadDrift:
        start = self._number("start", low=0.0)
        end = self._number("end", low=start)
        seed = self._item.get("seed", 0)
        if type(seed) is not int or not 0 <= seed < 1 << 32:
            self._fail(f"seed is {shorten(repr(seed))}, must be from 0 to {(1 << 32) - 1}")
        drift = LoadDrift(
            deployment=deployment,
            start=start,
            end=end,
            every=self._number("every", low=1e-3),
            noise=self._number("noise", low=0.0, high=LARGEST_NOISE),
            correlation=self._number("correlation", low=0.0, high=1.0),
            seed=seed,
        )
        if drift.windows > MOST_WINDOWS:
            self._fail(f"every is {drift.every:g}: the loads change at most {MOST_WINDOWS} times")
        return drift

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
