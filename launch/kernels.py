"""Which kernels a deployment runs: the table's for its device, but for what its plan forces. No torch."""

from collections.abc import Mapping
from types import MappingProxyType

from moe_runtime.kernels.registry import Forced
from moe_runtime.models.ops import Ops, column
from moe_runtime.plan.effective import EffectiveDeployment
from moe_runtime.spec.model import MlaSpec, ModelSpec

# What a plan may force -> its column. `torch` and `triton` are the device's own.
COLUMNS: Mapping[str, str] = MappingProxyType(
    {"reference": "any", "deepgemm": "deepgemm", "flash_mla": "flash_mla"}
)


def kernels_of(deployment: EffectiveDeployment) -> Forced:
    """What `build_decoder` takes its operations from."""
    chosen = {"experts": deployment.kernels.experts, "mla_decode": deployment.kernels.mla_decode}
    forced = {op: COLUMNS[name] for op, name in chosen.items() if name in COLUMNS}
    if "mla_decode" in forced:  # attention goes with the plan of its own column
        forced["plan_decode"] = forced["mla_decode"]
    return Forced(forced)


def kernels_in_use(deployment: EffectiveDeployment, model: ModelSpec, device: str) -> dict[str, str]:
    """Operation -> module that runs it, of the operations that a decoder of the model uses."""
    modules = kernels_of(deployment).modules(column(device, deterministic=deployment.deterministic))
    other = "gqa" if isinstance(model.attention, MlaSpec) else "mla"
    return {op: modules[op] for op in Ops.__dataclass_fields__ if not op.startswith(other)}
