"""From a plan to what its simulation is made of: expert loads, placements and a cost model per deployment.

Owns what is assumed where the plan does not say. Placements that the plan names come from the caller.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moe_runtime.errors import InputError
from moe_runtime.placement.placement import Placement
from moe_runtime.plan.effective import EffectiveDeployment, EffectivePlan
from moe_runtime.spec.bytes import replicated_weight_bytes, slot_bytes
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.common import require_rates
from moe_runtime.virtual.cost.balance import Drift
from moe_runtime.virtual.cost.constants import Machine, constants
from moe_runtime.virtual.cost.from_plan import plan_setting
from moe_runtime.virtual.cost.loads import is_recorded
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.run.loads import Assumed, DeploymentLoads, LoadChoice, expert_loads


@dataclass(frozen=True, slots=True)
class Workload:
    """Mean tokens of a request of the trace."""

    prompt: float
    output: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One deployment: its instances are alike. `model` as it is served: shared experts may be in slots.

    slot_bytes    of one expert's weights in a layer
    weight_bytes  of everything a rank reads when it starts
    """

    deployment: EffectiveDeployment
    model: ModelSpec
    loads: DeploymentLoads
    cost: CostModel
    slot_bytes: int
    weight_bytes: int

    @property
    def read_seconds(self) -> float:
        """To read a rank's weights over the network, each rank over its own link."""
        return self.cost.links.bulk(self.weight_bytes)

    @property
    def assumed(self) -> Assumed:
        """At the start."""
        return self.loads.assumed


def prepare(
    plan: EffectivePlan,
    model: ModelSpec,
    placements: Mapping[str, Placement],
    workload: Workload,
    choice: LoadChoice,
) -> dict[str, Prepared]:
    """Every deployment by name. `placements`: what each starts with.

    Raises InputError for a machine without constants, loads that are not recorded, sizes that cannot be.
    """
    require_rates(_machine(plan.cluster.hardware), model, plan.model.dtype, where="model.dtype")
    return {d.name: _prepare(plan, model, d, placements[d.name], workload, choice) for d in plan.deployments}


def assumptions(choice: LoadChoice, model: ModelSpec, weights: str) -> tuple[str, ...]:
    """What a reader of the report should know of them, in sentences."""
    notes = [f"Simulated in virtual time with {weights} weights: no figure was measured."]
    if choice.kind == "recorded":
        notes.append("Expert loads are those published of DeepSeek-V3, with drift from batch to batch.")
    elif not is_recorded(model):
        notes.append(f"No expert loads of this model are recorded: {choice} is assumed.")
    else:
        notes.append(f"Expert loads are synthetic: {choice}.")
    return tuple(notes)


def _machine(hardware: str) -> Machine:
    """InputError for one that the cost model does not know."""
    machines = constants().machines
    if hardware not in machines:
        raise InputError(
            f"cluster.hardware is {hardware!r}, of which the cost model knows nothing;"
            f" it knows {', '.join(machines)}"
        )
    return machines[hardware]


def _prepare(
    plan: EffectivePlan,
    model: ModelSpec,
    deployment: EffectiveDeployment,
    start: Placement,
    workload: Workload,
    choice: LoadChoice,
) -> Prepared:
    served, fitted = deployment.served(model), constants().fitted
    setting = plan_setting(plan.cluster, deployment, weights=model.weight_dtype(plan.model.dtype))
    assumed = Assumed(
        load_LE=expert_loads(choice, served, role=deployment.name, ranks=deployment.expert_parallel, seed=0),
        placement=start,
        redundant_experts=deployment.redundant_experts,
        moe_layers=served.moe_layers,
        top_k=served.moe.slots_per_token,
        ranks_per_node=setting.ranks_per_node,
        drift=Drift(common=fitted.drift_common, sequence=fitted.drift_sequence),
        tokens_per_sequence=_tokens_per_sequence(deployment, workload),
        tokens_of_sequence=_tokens_of_sequence(deployment, workload),
    )
    loads, dtype = DeploymentLoads(assumed), plan.model.dtype
    everywhere = slot_bytes(served, dtype)
    return Prepared(
        deployment=deployment,
        model=served,
        loads=loads,
        cost=CostModel(served, setting, loads.balance),
        slot_bytes=everywhere // served.num_moe_layers,
        weight_bytes=replicated_weight_bytes(served, dtype) + deployment.slots_per_rank * everywhere,
    )


def _tokens_per_sequence(deployment: EffectiveDeployment, workload: Workload) -> float:
    """Rows of a step over the sequences they are of: 1 in decode, a chunk of a prompt in prefill."""
    chunks = math.ceil(workload.prompt / deployment.scheduler.chunk_tokens)
    if deployment.name == "prefill":
        return max(1.0, workload.prompt / chunks)
    if deployment.name == "decode":
        return 1.0
    return max(1.0, (workload.prompt + workload.output) / (chunks + workload.output))


def _tokens_of_sequence(deployment: EffectiveDeployment, workload: Workload) -> float:
    """Rows of a request in all its steps."""
    rows = workload.prompt * (deployment.name != "decode") + workload.output * (deployment.name != "prefill")
    return max(1.0, rows)
