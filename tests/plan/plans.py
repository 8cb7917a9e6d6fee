"""Plan texts that tests share, and the way from text to a checked plan."""

from pathlib import Path

from moe_runtime.plan.budget import MemoryBudget
from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.plan.load import LoadedPlan, load_plan
from moe_runtime.plan.resolve import resolve
from moe_runtime.plan.validate import validate
from moe_runtime.spec.catalog import CATALOG, catalog_name
from moe_runtime.spec.model import ModelSpec
from tests.spec.model_specs import SMALL_DEEPSEEK

SPLIT = """\
model: {path: checkpoint, dtype: float32}
cluster: {nodes: 1, ranks_per_node: 6}
deployments:
  prefill:
    expert_parallel: 2
  decode:
    expert_parallel: 4
    redundant_experts: 8
"""

UNIFIED = """\
model: {path: checkpoint}
deployments:
  unified: {}
"""

GIB = 2**30


def write(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


def load(folder: Path, text: str, *overrides: str) -> LoadedPlan:
    return load_plan(write(folder, text), overrides)


def effective(folder: Path, text: str, *overrides: str, model: ModelSpec = SMALL_DEEPSEEK) -> EffectivePlan:
    return resolve(load(folder, text, *overrides).plan, model)


def checked(
    folder: Path,
    text: str,
    *overrides: str,
    model: ModelSpec | None = None,
    host_memory_bytes: int | None = 64 * GIB,
) -> tuple[LoadedPlan, EffectivePlan, tuple[MemoryBudget, ...]]:
    """What the command line does with a plan; the model is given, the catalog's, or a small one."""
    loaded = load(folder, text, *overrides)
    if model is None:
        model = CATALOG.get(catalog_name(loaded.plan.model.path) or "", SMALL_DEEPSEEK)
    plan = resolve(loaded.plan, model)
    return loaded, plan, validate(loaded, plan, model, host_memory_bytes=host_memory_bytes)
