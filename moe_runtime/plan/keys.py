"""The keys of the schema as a table: what each expects, and which one a mistyped key meant.

Derived from `schema` alone, so messages cannot drift from the models. `*` stands for the name
of a deployment.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from moe_runtime.plan.problems import Path
from moe_runtime.plan.schema import DEPLOYMENT_NAMES, DeploymentSection, Plan, Section

DEPLOYMENTS = "deployments"
ANY_DEPLOYMENT = "*"
ENOUGH_ALIKE = 0.6

SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_parallel",
        "ep": "expert_parallel",
        "ep_size": "expert_parallel",
        "moe_ep_size": "expert_parallel",
        "dp": "expert_parallel",
        "dp_size": "expert_parallel",
        "gpus_per_node": "ranks_per_node",
        "block_size": "block_tokens",
        "page_size": "block_tokens",
        "gpu_memory_utilization": "blocks",
        "mem_fraction_static": "blocks",
        "max_model_len": "blocks",
        "max_num_seqs": "max_sequences",
        "max_running_requests": "max_sequences",
        "chunked_prefill_size": "chunk_tokens",
        "deepep_mode": "mode",
        "max_num_batched_tokens": "max_batch_tokens",
        "eplb": "balancing",
    }
)
"""Other engines' words for keys of ours, where spelling does not show the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the schema; `section` for those that hold other keys.

    `expected` says in words what `type` accepts; `words` are the words among that.
    """

    path: Path
    type: Any
    expected: str
    words: tuple[str, ...]
    default: object
    section: type[Section] | None

    def accepts(self, value: object) -> bool:
        """Whether the key may have the value, other keys aside."""
        if self.section is not None and not isinstance(value, Mapping):
            return False
        # Sections bring their own configuration, which is strict too.
        config = None if self.section is not None else ConfigDict(strict=True)
        try:
            TypeAdapter(self.type, config=config).validate_python(value)
        except ValidationError:
            return False
        return True


@cache
def schema_keys() -> Mapping[Path, Key]:
    """Every key in schema order, deployments as `deployments.*`."""
    return MappingProxyType({key.path: key for key in _walk(Plan, ())})


def _walk(section: type[Section], prefix: Path) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        key = _key(path, annotation, field.default)
        yield key
        if key.section is not None:
            yield from _walk(key.section, path)
        elif name == DEPLOYMENTS:
            path = (*path, ANY_DEPLOYMENT)
            yield _key(path, DeploymentSection, None)
            yield from _walk(DeploymentSection, path)


def _key(path: Path, annotation: Any, default: object) -> Key:
    return Key(
        path=path,
        type=annotation,
        expected=_expected(annotation),
        words=tuple(_words(annotation)),
        default=default,
        section=annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None,
    )


def pattern(path: Path) -> Path:
    """The path with the deployment's name replaced by `*`."""
    if len(path) > 1 and path[0] == DEPLOYMENTS:
        return (DEPLOYMENTS, ANY_DEPLOYMENT, *path[2:])
    return path


def key_of(path: Path) -> Key | None:
    """The schema's entry for a concrete path; None for an unknown key or deployment name."""
    if len(path) > 1 and path[0] == DEPLOYMENTS and path[1] not in DEPLOYMENT_NAMES:
        return None
    return schema_keys().get(pattern(path))


def children(path: Path) -> tuple[str, ...]:
    """Names of the keys directly under `path`."""
    if path == (DEPLOYMENTS,):
        return DEPLOYMENT_NAMES
    parent = pattern(path)
    return tuple(k[-1] for k in schema_keys() if k[:-1] == parent)


def leaf_paths(deployments: Sequence[str]) -> Iterator[Path]:
    """Every key that holds a value, in schema order, for the given deployments."""
    leaves = [k.path for k in schema_keys().values() if k.section is None and k.path != (DEPLOYMENTS,)]
    of_deployments = [p for p in leaves if p[0] == DEPLOYMENTS]
    yield from (p for p in leaves if p[0] in ("model", "cluster"))
    for name in deployments:
        yield from ((DEPLOYMENTS, name, *p[2:]) for p in of_deployments)
    yield from (p for p in leaves if p[0] not in ("model", "cluster", DEPLOYMENTS))


def _expected(annotation: Any) -> str:
    """What a value must be, in words."""
    choices = list(_choices(annotation, ()))
    return choices[0] if len(choices) == 1 else ", ".join(choices[:-1]) + " or " + choices[-1]


def _words(annotation: Any) -> Iterator[str]:
    """The literal words among what a value may be."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, UnionType):
        for alternative in get_args(annotation):
            yield from _words(alternative)


def _choices(annotation: Any, metadata: Sequence[Any]) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        yield from _choices(inner, more)
    elif origin in (Union, UnionType):
        for alternative in get_args(annotation):
            yield from _choices(alternative, ())
    elif origin is Literal:
        yield from (str(a) for a in get_args(annotation))
    elif annotation is bool:
        yield "true or false"
    elif annotation in (int, float):
        yield ("an integer" if annotation is int else "a number") + _range(metadata)
    elif annotation is str:
        yield "text that is not empty" if any(isinstance(m, MinLen) for m in metadata) else "text"
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield "a mapping with keys of " + ", ".join(annotation.model_fields)
    else:
        yield "a mapping with `unified`, or with `prefill` and `decode`"


def _range(metadata: Sequence[Any]) -> str:
    words = []
    for bound in metadata:
        match bound:
            case Ge():
                words.append(f"from {bound.ge}")
            case Gt():
                words.append(f"above {bound.gt}")
            case Le():
                words.append(f"to {bound.le}")
    return "".join(f" {w}" for w in words)


def suggestion(path: Path, deployments: Sequence[str]) -> str:
    """Which valid key an unknown one meant, and in which section it is valid.

    `deployments` are the names the plan has; they stand in for `*`.
    """
    parent = path[:-1]
    valid = children(parent) if key_of(parent) or not parent else ()
    if parent == (DEPLOYMENTS,):
        near = get_close_matches(path[-1][:80], DEPLOYMENT_NAMES, n=1)
        known = f"deployments are called {', '.join(DEPLOYMENT_NAMES[:-1])} or {DEPLOYMENT_NAMES[-1]}"
        return f"did you mean {near[0]}?" if near else known
    best, score = _nearest(path)
    if score < ENOUGH_ALIKE:
        return (
            "valid keys here: " + ", ".join(valid) if valid else "the sections are " + ", ".join(children(()))
        )
    if best[:-1] == pattern(parent):
        return f"did you mean {best[-1]}?"
    if best[0] == DEPLOYMENTS and len(best) > 1:
        in_same = parent[:1] == (DEPLOYMENTS,) and len(parent) > 1
        names = [parent[1]] if in_same else list(deployments)
        best = (DEPLOYMENTS, names[0] if len(names) == 1 else "<name>", *best[2:])
    where = f"section {'.'.join(best[:-1])}" if len(best) > 1 else "the top level"
    return f"did you mean {best[-1]} in {where}?"


def meant_section(path: Path) -> bool:
    """Whether an unknown key looks like a section (or deployment name) of the place it stands in."""
    if path[:-1] == (DEPLOYMENTS,):
        return True
    sections = [k for k in schema_keys().values() if k.section is not None or k.path == (DEPLOYMENTS,)]
    here = [k.path[-1] for k in sections if k.path[:-1] == pattern(path[:-1])]
    return any(_alike(path[-1][:80].lower(), name) >= ENOUGH_ALIKE for name in here)


def _nearest(path: Path) -> tuple[Path, float]:
    """The schema key most like an unknown one, and how alike they are (0..1, more in its section)."""
    parent, name = pattern(path[:-1]), path[-1][:80].lower()
    asked = {name, SYNONYMS.get(name, name)}
    if parent and parent not in schema_keys():
        asked.add(f"{path[-2][:80].lower()}_{name}")
    best: Path = ()
    best_score = 0.0
    for candidate in schema_keys():
        if candidate[-1] == ANY_DEPLOYMENT:
            continue
        names = {candidate[-1], "_".join(candidate[-2:])}
        score = max(_alike(a, c) for a in asked for c in names)
        score += 0.05 * (candidate[:-1] == parent)
        if score > best_score:
            best, best_score = candidate, score
    return best, best_score


def _alike(a: str, b: str) -> float:
    """Likeness of two names as wholes, or of their words weighted by length."""
    whole = SequenceMatcher(None, a, b).ratio()
    words = [w for w in a.split("_") if w]
    total = sum(len(w) for w in words)
    if not total:
        return whole
    by_word = sum(len(w) * max(SequenceMatcher(None, w, c).ratio() for c in b.split("_")) for w in words)
    return max(whole, 0.95 * by_word / total)
