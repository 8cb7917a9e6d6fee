"""What a checkpoint has to be to take the place of the one that is served. No torch."""

from dataclasses import fields
from pathlib import Path

from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.errors import CheckpointError, PlanError
from moe_runtime.launch.preflight import Preflight
from moe_runtime.models.families.registry import read_spec, skipped_tensor
from moe_runtime.report.machine import available_memory_bytes

TOKENIZER = "tokenizer.json"


def require_replacement(flight: Preflight, path: Path) -> None:
    """Check config, tokenizer and headers of a checkpoint against the plan's.

    Its dtype may differ: weights are converted as they are read. Raises CheckpointError naming what differs
    or is missing, and PlanError where nothing can be reloaded, for want of memory for a second set of weights
    or altogether.
    """
    plan = flight.effective
    if plan.cluster.device != "cpu":
        raise PlanError("cluster.device", "weights are reloaded on CPUs only", value=plan.cluster.device)
    ranks = [d.instances * d.expert_parallel for d in plan.deployments]
    needed = sum(b.weights * n for b, n in zip(flight.budgets, ranks, strict=True)) // plan.cluster.nodes
    free = available_memory_bytes()
    if free is not None and needed > free:
        text = (
            f"the new weights take {needed >> 20} MiB of this host beside the old, {free >> 20} MiB are free"
        )
        raise PlanError("model", text)
    served = flight.model
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r}: is no path")
    model = read_spec(path, served.dtype)
    differing = [f.name for f in fields(served) if getattr(served, f.name) != getattr(model, f.name)]
    if differing:
        named = ", ".join(f"{n}: {getattr(model, n)!r} instead of {getattr(served, n)!r}" for n in differing)
        raise CheckpointError(f"{path}: another model than the one that is served; {named}")
    mine, theirs = Path(plan.model.path) / TOKENIZER, path / TOKENIZER
    try:
        differs = theirs.exists() and theirs.read_bytes() != mine.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{theirs}: cannot be read: {error}") from None
    if differs:
        raise CheckpointError(f"{theirs}: another tokenizer than the one that is served")
    with Checkpoint.open(path) as checkpoint:
        checkpoint.validate(flight.targets, lambda name: skipped_tensor(served, name))
