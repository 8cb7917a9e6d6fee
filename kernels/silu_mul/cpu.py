"""silu_mul on a CPU: no second temporary."""

import math

from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels.silu_mul import reference
from moe_runtime.kernels.silu_mul.reference import Kind


def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    kind: Kind = "silu",
    limit: float = math.inf,
    counts_s: Tensor | None = None,
) -> Tensor:
    """As the reference, bit for bit."""
    if kind == "silu" and limit == math.inf:
        return F.silu(gate).mul_(up)
    return reference.silu_mul(gate, up, kind=kind, limit=limit, counts_s=counts_s)
