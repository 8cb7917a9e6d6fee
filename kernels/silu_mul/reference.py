"""silu_mul: the gated activation of an MLP."""

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; rounds to the dtype after each of the two, as transformers does."""
    return F.silu(gate) * up
