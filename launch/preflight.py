"""Everything that can be known before a rank starts: plan, model, checkpoint files. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.launch.initial import initial_placement
from moe_runtime.models.families.registry import read_spec, skipped_tensor, tensor_targets
from moe_runtime.placement.placement import Placement
from moe_runtime.plan.budget import MemoryBudget
from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.plan.load import LoadedPlan, load_plan
from moe_runtime.plan.problems import Problem
from moe_runtime.plan.resolve import resolve
from moe_runtime.plan.unavailable import unavailable_to_run
from moe_runtime.plan.validate import validate
from moe_runtime.report.machine import read_machine
from moe_runtime.spec.catalog import CATALOG, catalog_name
from moe_runtime.spec.model import ModelSpec
from moe_runtime.spec.weights import TensorTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A valid plan and the model it serves. `obstacles` keep it from running on this machine; `placements`
    are what its deployments start with. A model of the catalog has no `targets`.
    """

    loaded: LoadedPlan
    effective: EffectivePlan
    model: ModelSpec
    targets: tuple[TensorTarget, ...]
    budgets: tuple[MemoryBudget, ...]
    obstacles: tuple[Problem, ...]
    placements: Mapping[str, Placement]


def preflight(
    plan_path: Path, overrides: Sequence[str], *, check_tensors: bool, to_run: bool = True
) -> Preflight:
    """Raises UserError (PlanError, CheckpointError) for whatever is wrong, and `to_run` for obstacles.

    `check_tensors` also validates the headers of all weight files; ranks, whose launcher did so,
    leave it out.
    """
    loaded = load_plan(plan_path, overrides)
    path, dtype = loaded.plan.model.path, loaded.plan.model.dtype
    name = catalog_name(path)
    if name is None and not Path(path).is_dir():
        hint = "a relative path counts from the plan's folder"
        loaded.raise_problems([Problem(path=("model", "path"), text=f"{path} is not a folder", hint=hint)])
    model = CATALOG[name] if name is not None else read_spec(Path(path), None if dtype == "auto" else dtype)
    effective = resolve(loaded.plan, model)
    memory = read_machine(hardware="", device="").memory_bytes
    budgets = validate(loaded, effective, model, host_memory_bytes=memory)
    obstacles = tuple(unavailable_to_run(effective, lambda package: find_spec(package) is not None))
    if to_run:
        loaded.raise_problems(obstacles)
    targets = tensor_targets(model) if name is None else ()
    if check_tensors and name is None:
        with Checkpoint.open(Path(effective.model.path)) as checkpoint:
            checkpoint.validate(targets, lambda name: skipped_tensor(model, name))
    return Preflight(
        loaded=loaded,
        effective=effective,
        model=model,
        targets=targets,
        budgets=budgets,
        obstacles=obstacles,
        placements={d.name: initial_placement(d.served(model), d) for d in effective.deployments},
    )
