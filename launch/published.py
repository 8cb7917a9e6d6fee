"""Published figures of the models that reports are about, with their conditions in words."""

from collections.abc import Iterable

from moe_runtime.report.reference import Reference
from moe_runtime.report.schema import ModelSummary
from moe_runtime.spec.catalog import CATALOG
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.published import FOLDER, PublishedRow, published_rows

_BALANCE = {
    "on": "balancer on",
    "off": "balancer off",
    "even": "even routing was simulated",
}


def references_for(models: Iterable[ModelSummary]) -> tuple[Reference, ...]:
    """All known figures of these models; none of a model that the catalogue does not have, as a small one."""
    names = dict.fromkeys(name for m in models if (name := _catalogue_name(m)) is not None)
    known = (name for name in names if (FOLDER / f"{name}.yaml").is_file())
    return tuple(_reference(row) for name in known for row in published_rows(name).values())


def _catalogue_name(model: ModelSummary) -> str | None:
    return next((name for name, spec in CATALOG.items() if _sizes(spec) == _summary_sizes(model)), None)


def _sizes(spec: ModelSpec) -> tuple[str | int, ...]:
    moe = spec.moe
    return (spec.family, spec.hidden, spec.num_layers, spec.num_moe_layers, moe.num_experts, moe.router.top_k)


def _summary_sizes(m: ModelSummary) -> tuple[str | int, ...]:
    return (m.family, m.hidden, m.num_layers, m.num_moe_layers, m.num_experts, m.top_k)


def _reference(row: PublishedRow) -> Reference:
    return Reference(
        id=row.id,
        model=row.model,
        role=row.role,
        value=row.value,
        gpus=row.per_node,
        machine=row.machine,
        conditions=_conditions(row),
        read=_read(row),
        source=row.source,
    )


def _conditions(row: PublishedRow) -> str:
    """One line, as `EP 72, 32 redundant experts, 256 sequences per GPU, mean context 2,050, ...`."""
    parallel = f"TP {row.tensor_parallel}" if row.tensor_parallel > 1 else f"EP {row.ranks}"
    whole = row.tensor_parallel > 1 and row.role == "prefill"
    what, once = ("tokens", " and step") if row.role == "prefill" else ("sequences", "")
    context = "prompts of" if row.role == "prefill" else "mean context"
    parts = [
        parallel,
        f"{row.redundant} redundant experts" if row.redundant else "",
        f"{row.batch:,} {what} per {'step of all GPUs' if whole else 'GPU' + once}",
        f"{context} {row.context:,}",
        "two micro-batches" if row.micro_batches == 2 else "no overlap",
        f"multi-token prediction ({row.queries} rows, {row.accepted:g} accepted)" if row.queries > 1 else "",
        "" if row.tensor_parallel > 1 else _BALANCE[row.balance],
    ]
    return ", ".join(part for part in parts if part)


def _read(row: PublishedRow) -> str:
    how = {"text": "in the text", "chart": "off a chart"}[row.read]
    return f"{how}; assumed: {row.assumed}" if row.assumed else how
