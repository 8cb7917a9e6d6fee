"""What a plan may say but this version cannot do: one table. A change that brings a feature
deletes its row (or adds a value to it).

Asked for and not possible is an error, never adjusted in silence. A plan for other machines than this
one can be checked in full; only running it is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moe_runtime.plan.deepep import BACKEND as DEEPEP
from moe_runtime.plan.deepep import PACKAGE
from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.plan.keys import ANY_DEPLOYMENT, DEPLOYMENTS
from moe_runtime.plan.problems import Path, Problem
from moe_runtime.plan.schema import MODEL_DTYPES
from moe_runtime.spec.catalog import catalog_name

MODEL_DTYPE = "<the model's dtype>"


@dataclass(frozen=True, slots=True)
class Rule:
    """Values of `key` that work in this version; `MODEL_DTYPE` stands for the effective dtype."""

    key: str
    works: tuple[object, ...]
    feature: str


RULES = (
    Rule("deployments.*.attention.tensor_parallel", (1,), "tensor-parallel attention"),
    Rule(
        "deployments.*.kv_cache.dtype", ("auto", MODEL_DTYPE), "a KV cache in another dtype than the model's"
    ),
    Rule(
        "deployments.*.dispatch.dtype",
        ("auto", MODEL_DTYPE, "bfloat16", "float8_e4m3"),
        "dispatch in a wider dtype than the model's",
    ),
)
RULES_TO_RUN = (Rule("cluster.device", ("cpu",), "running on GPUs"),)


def unavailable(
    root: object, deployments: Sequence[tuple[str, object]], dtype: str | None
) -> Iterator[Problem]:
    """Every rule broken by a plan or an effective plan (their sections are named alike).

    `dtype` None: the model's dtype is not known yet, so any dtype of a model passes.
    """
    yield from _broken(RULES, root, deployments, dtype)


def unavailable_to_run(effective: EffectivePlan, installed: Callable[[str], bool]) -> Iterator[Problem]:
    """What keeps a plan that `check` accepts from running here.

    `installed` tells of a package by its import name.
    """
    if catalog_name(effective.model.path) is not None:
        yield Problem(
            path=("model", "path"),
            text="names a model of the catalog, which has sizes but no weights",
            value=effective.model.path,
            hint="set it to the folder of a checkpoint: --set model.path=DIR",
        )
    yield from _broken(RULES_TO_RUN, effective, tuple(effective.by_name.items()), effective.model.dtype)
    for d in effective.deployments:
        if d.balancing.enabled and effective.cluster.device != "cpu":
            yield Problem(
                path=(DEPLOYMENTS, d.name, "balancing", "enabled"),
                text=f"runs on cpu in this version; cluster.device is {effective.cluster.device}",
                value=True,
                hint="set it to false",
            )
    if installed(PACKAGE):
        return
    for d in effective.deployments:
        if d.dispatch.backend == DEEPEP:
            yield Problem(
                path=(DEPLOYMENTS, d.name, "dispatch", "backend"),
                text=f"needs {PACKAGE}, which is not installed",
                value=DEEPEP,
                hint="pip install 'moe-runtime[deepep]'",
            )


def _broken(
    rules: Sequence[Rule], root: object, deployments: Sequence[tuple[str, object]], dtype: str | None
) -> Iterator[Problem]:
    for rule in rules:
        works = _values(rule.works, dtype)
        for path, value in _occurrences(rule.key, root, deployments):
            if value not in works:
                yield Problem(
                    path=path,
                    text=f"{rule.feature} is not available in this version",
                    value=value,
                    hint="set it to " + " or ".join(_yaml(v) for v in works),
                )


def _values(works: Sequence[object], dtype: str | None) -> list[object]:
    dtypes = MODEL_DTYPES if dtype is None else (dtype,)
    return list(dict.fromkeys(v for w in works for v in (dtypes if w == MODEL_DTYPE else (w,))))


def _occurrences(
    key: str, root: object, deployments: Sequence[tuple[str, object]]
) -> Iterator[tuple[Path, object]]:
    parts = tuple(key.split("."))
    if parts[:2] != (DEPLOYMENTS, ANY_DEPLOYMENT):
        yield parts, _attribute(root, parts)
        return
    for name, deployment in deployments:
        yield (DEPLOYMENTS, name, *parts[2:]), _attribute(deployment, parts[2:])


def _attribute(value: object, path: Path) -> object:
    for name in path:
        value = getattr(value, name)
    return value


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
