"""Plan file and `--set` overrides -> LoadedPlan: a valid plan and where each value came from.

Owns reading, precedence (default < file < command line) and provenance. Every problem is a
PlanError; problems of one plan are reported together, a line each. Needs no model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal

from pydantic import ValidationError

from moe_runtime.errors import PlanError
from moe_runtime.plan.invalid import invalid_values
from moe_runtime.plan.keys import DEPLOYMENTS, children, key_of, leaf_paths, meant_section, suggestion
from moe_runtime.plan.plan_rules import plan_problems
from moe_runtime.plan.problems import Path, Problem, dotted, raise_problems, shorten
from moe_runtime.plan.schema import DEPLOYMENT_NAMES, DeploymentSection, Plan
from moe_runtime.plan.yaml_tree import parse
from moe_runtime.spec.catalog import catalog_name

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value was set; `line` of the plan file."""

    kind: Literal["default", "file", "command line"]
    line: int | None = None

    def __str__(self) -> str:
        return self.kind if self.line is None else f"{self.kind} line {self.line}"


DEFAULT = Origin(kind="default")
COMMAND_LINE = Origin(kind="command line")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlan:
    """A plan that is valid by itself.

    `plan.model.path` is absolute, or names a model of the catalog. `origins` has every key that holds a
    value, dotted.
    """

    path: FilePath
    plan: Plan
    overrides: tuple[str, ...]
    origins: Mapping[str, Origin]

    def where(self, key: Path) -> str:
        """`file:line`, `--set` or nothing, for messages about a key."""
        return _where(self.origins.get(dotted(key), DEFAULT), self.path.name)

    def raise_problems(self, problems: Sequence[Problem]) -> None:
        """PlanError with the lines of the keys, if there is any problem."""
        raise_problems(problems, self.where)


def load_plan(path: FilePath, overrides: Sequence[str] = ()) -> LoadedPlan:
    """Reads, overrides and validates a plan.

    `overrides` are `key.path=value`, the value in YAML; later ones win. A relative `model.path` or
    `balancing.initial`, wherever it was set, starts at the folder of the plan file. Raises PlanError.
    """
    draft = _Draft(path.name)
    draft.read(path)
    for override in overrides:
        draft.override(override)
    draft.drop_unknown(draft.value, ())
    try:
        plan = Plan.model_validate(draft.value)
    except ValidationError as error:
        named = {p.path for p in draft.problems}
        draft.problems += [p for p in invalid_values(error, draft.value) if p.path not in named]
    else:
        draft.problems += plan_problems(plan)
    draft.raise_problems()
    folder = path.resolve().parent
    model = plan.model
    if catalog_name(model.path) is None:
        model = model.model_copy(update={"path": str((folder / model.path).resolve())})
    origins = {dotted(p): draft.origins.get(p, DEFAULT) for p in leaf_paths(list(plan.deployments))}
    return LoadedPlan(
        path=path,
        plan=plan.model_copy(
            update={
                "model": model,
                "deployments": {name: _placed(d, folder) for name, d in plan.deployments.items()},
            }
        ),
        overrides=tuple(overrides),
        origins=origins,
    )


def _placed(deployment: DeploymentSection, folder: FilePath) -> DeploymentSection:
    """With an absolute path of the file that the initial placement comes from, if it does."""
    balancing = deployment.balancing
    if balancing.initial == "linear":
        return deployment
    path = str((folder / balancing.initial).resolve())
    return deployment.model_copy(update={"balancing": balancing.model_copy(update={"initial": path})})


def _where(origin: Origin, file: str) -> str:
    if origin.kind == "command line":
        return "--set"
    return f"{file}:{origin.line}" if origin.kind == "file" else ""


class _Draft:
    """Values that are not yet known to be a plan, their origins, and what is wrong with them."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.value: dict[str, Any] = {}
        self.origins: dict[Path, Origin] = {}
        self.problems: list[Problem] = []

    def read(self, path: FilePath) -> None:
        tree = parse(_read_text(path), str(path))
        if not isinstance(tree.value, dict):
            kind = "is empty" if tree.value is None else "is not a mapping of keys"
            raise PlanError(str(path), kind, hint="a plan has the keys " + ", ".join(children(())))
        self.value = tree.value
        self.origins = {p: Origin(kind="file", line=line) for p, line in tree.lines.items()}
        self.problems += tree.problems

    def override(self, text: str) -> None:
        """Puts one `key.path=value` into the values."""
        name, equals, value_text = text.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise PlanError(
                "--set", "is not key.path=value", value=shorten(text), hint="for example server.port=8001"
            )
        tree = parse(value_text, f"--set {dotted(path)}")
        self.problems += tree.problems
        if key_of(path) is None:
            hint = suggestion(path, self.deployments)
            self.problems.append(Problem(path=path, text="is not a key of the plan (--set)", hint=hint))
            return
        holder: Any = self.value
        for i, part in enumerate(path[:-1]):
            if path[:i] == (DEPLOYMENTS,) and part not in holder:
                names = ", ".join(self.deployments)
                problem = Problem(
                    path=path, text=f"the plan has no deployment {part} (--set)", hint=f"it has {names}"
                )
                self.problems.append(problem)
                return
            holder = holder.setdefault(part, {})
            if not isinstance(holder, dict):
                return  # the file's value is no section: reported by validation
        holder[path[-1]] = tree.value
        self.origins = {p: o for p, o in self.origins.items() if p[: len(path)] != path}
        self.origins[path] = COMMAND_LINE
        self.origins.update({(*path, *p): COMMAND_LINE for p in tree.lines})

    @property
    def deployments(self) -> list[str]:
        """The valid names among the plan's deployments; all names if that section is none."""
        section = self.value.get(DEPLOYMENTS)
        return [n for n in DEPLOYMENT_NAMES if not isinstance(section, dict) or n in section]

    def drop_unknown(self, section: dict[str, Any], path: Path) -> None:
        """Takes unknown keys and empty values out of the values and into the problems."""
        for name in list(section):
            here, value = (*path, name), section[name]
            key = key_of(here)
            if key is None:
                del section[name]
                self.problems += self._unknown(here, value)
            elif value is None:
                del section[name]
                problem = Problem(
                    path=here, text="has no value", hint=f"give {key.expected}, or delete the key"
                )
                self.problems.append(problem)
            elif isinstance(value, dict) and (key.section or here == (DEPLOYMENTS,)):
                self.drop_unknown(value, here)

    def _unknown(self, path: Path, value: object) -> Iterator[Problem]:
        """A section that is meant for one of ours is told as such, the keys of a foreign one singly."""
        if isinstance(value, dict) and value and not meant_section(path):
            for name, inner in value.items():
                yield from self._unknown((*path, name), inner)
            return
        text = "is not a key of the plan"
        yield Problem(path=path, text=text, value=value, hint=suggestion(path, self.deployments))

    def raise_problems(self) -> None:
        order = {path: i for i, path in enumerate(self.origins)}
        self.problems.sort(key=lambda p: order.get(p.path, len(order)))
        raise_problems(self.problems, lambda p: _where(self._origin(p), self.file))

    def _origin(self, path: Path) -> Origin:
        """Of the key itself; a key that is not there has none."""
        return self.origins.get(path, DEFAULT)


def _read_text(path: FilePath) -> str:
    try:
        if path.exists() and not path.is_file():
            raise PlanError(str(path), "must be a regular file: every process reads it")
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(str(path), f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise PlanError(repr(str(path)), f"is not a path: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise PlanError(str(path), f"has {len(data)} bytes, a plan has at most {MAX_FILE_BYTES}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PlanError(f"{path}:{line}", f"is not UTF-8 text (byte {error.start})") from error
