"""What simulations and searches ask and assume alike: rates of machines, how uneven unknown loads are."""

from moe_runtime.errors import InputError
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.constants import Machine

# Experts in order on 32 ranks are as uneven under a power law of this exponent as under DeepSeek-V3's loads:
# what is assumed of a model of which no loads are recorded.
LIKE_RECORDED = 0.63


def require_rates(machine: Machine, model: ModelSpec, dtype: str, *, where: str) -> None:
    """InputError that begins with `where` if the machine has no rate for `dtype` or the model's weights."""
    name, rates = machine.hardware.name, machine.hardware.flops
    for needed in (dtype, model.weight_dtype(dtype)):
        if needed not in rates:
            raise InputError(f"{where}: {name} has no rate for {needed}; it has {', '.join(rates)}")
