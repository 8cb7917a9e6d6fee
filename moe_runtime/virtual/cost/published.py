"""Published operating points and what the model says of them: what it is fitted on and judged by.

Owns the reading of configs/published/*.yaml and the way from a row to a step. No constant of the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from moe_runtime.errors import InputError
from moe_runtime.placement.placement import Placement
from moe_runtime.spec.bytes import slots_per_rank
from moe_runtime.spec.catalog import CATALOG
from moe_runtime.virtual.cost.balance import EVEN_BALANCE, Balance, Drift, draw_balance
from moe_runtime.virtual.cost.constants import Constants, read_yaml
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.loads import deepseek_v3, place
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.shapes import StepCost, StepShape, decode_step, prefill_step

FOLDER = Path(__file__).resolve().parent.parent / "published_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published figure with its conditions; the keys are explained in the file itself."""

    id: str
    value: float
    read: Literal["text", "chart"]
    source: str
    scored: bool
    model: str
    machine: str
    role: Literal["prefill", "decode"]
    ranks: int
    redundant: int
    batch: int
    context: int
    micro_batches: Literal[1, 2]
    balance: Literal["on", "off", "even"]
    library: str | None = None
    queries: int = 1
    accepted: float = 1.0
    per_node: int = 8
    ranks_per_node: int = 8
    tensor_parallel: int = 1
    assumed: str = ""
    inferred: str = ""


@cache
def published_rows(model: str = "deepseek-v3", folder: Path = FOLDER) -> Mapping[str, PublishedRow]:
    """The rows of a model by id, in the file's order. InputError for a file that is wrong."""
    path = folder / f"{model}.yaml"
    data = read_yaml(path)
    try:
        sources: dict[str, str] = data["sources"]
        rows = [
            PublishedRow(model=model, **{**row, "source": sources[row["source"]]}) for row in data["rows"]
        ]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: wrong or missing entry: {error!r}") from error
    return {row.id: row for row in rows}


def predict(row: PublishedRow, known: Constants) -> tuple[float, StepCost]:
    """Tokens/s of `per_node` GPUs as the model has it, and the step behind it."""
    shape = step_of(row)
    cost = CostModel(CATALOG[row.model], setting_of(row), balance_of(row, known), known=known).step(shape)
    if row.role == "prefill":
        tokens = float(shape.prefill_tokens_R.sum())
    else:
        tokens = float(shape.decode_sequences_R.sum()) * row.accepted
    return tokens / cost.seconds / row.ranks * row.per_node, cost


def error_of(row: PublishedRow, known: Constants) -> float:
    """Predicted over published, less one."""
    return predict(row, known)[0] / row.value - 1


def held_out(known: Constants, model: str = "deepseek-v3") -> list[PublishedRow]:
    """Rows to judge by: those of which nothing was used."""
    rows = published_rows(model).values()
    return [row for row in rows if row.scored and not row.inferred and row.id not in known.fitted.rows]


def setting_of(row: PublishedRow) -> Setting:
    """The instance of a row."""
    experts = CATALOG[row.model].moe.num_experts
    return Setting(
        machine=row.machine,
        ranks=row.ranks,
        ranks_per_node=row.ranks_per_node,
        slots_per_rank=slots_per_rank(experts, row.redundant, row.ranks),
        experts="tensor_parallel" if row.tensor_parallel > 1 else "expert_parallel",
        tensor_parallel=row.tensor_parallel,
        library=row.library,
    )


def step_of(row: PublishedRow) -> StepShape:
    """One step of a row's conditions, every rank alike."""
    if row.role == "prefill":
        groups = row.ranks // row.tensor_parallel
        return prefill_step(groups, row.batch, row.context, micro_batches=row.micro_batches)
    if row.tensor_parallel > 1:
        return decode_step(1, row.batch * row.ranks, row.context, queries=row.queries)
    return decode_step(
        row.ranks, row.batch, row.context, queries=row.queries, micro_batches=row.micro_batches
    )


def balance_of(row: PublishedRow, known: Constants) -> Balance:
    """How a row's experts are loaded."""
    if row.balance == "even":
        return EVEN_BALANCE
    return deployment_balance(
        Deployed(row.model, row.role, row.ranks, row.ranks_per_node, row.redundant, row.balance == "on"),
        Drift(common=known.fitted.drift_common, sequence=known.fitted.drift_sequence),
        row.context if row.role == "prefill" else 1,
    )


class Deployed(NamedTuple):
    """What a placement on recorded loads depends on."""

    model: str
    role: Literal["prefill", "decode"]
    ranks: int
    ranks_per_node: int
    redundant: int
    balanced: bool


@cache
def deployment_placement(deployed: Deployed) -> Placement:
    """The balancer's placement on the recorded loads of the role, or experts in order."""
    return place(
        deepseek_v3(deployed.role),
        ranks=deployed.ranks,
        ranks_per_node=deployed.ranks_per_node,
        redundant_experts=deployed.redundant,
        balanced=deployed.balanced,
        groups=CATALOG[deployed.model].moe.router.num_groups,
    )


@cache
def deployment_balance(deployed: Deployed, drift: Drift, tokens_per_sequence: int) -> Balance:
    """Spreads of that placement on the recorded loads of the role."""
    return draw_balance(
        deepseek_v3(deployed.role),
        deployment_placement(deployed),
        top_k=CATALOG[deployed.model].moe.router.top_k,
        drift=drift,
        tokens_per_sequence=tokens_per_sequence,
        ranks_per_node=deployed.ranks_per_node,
    )
