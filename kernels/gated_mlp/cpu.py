"""gated_mlp on a CPU, for plain and for packed weights (see `pack`; gate and up are its two parts)."""

from torch import Tensor

from moe_runtime.kernels.linear.cpu import linear, packed_product
from moe_runtime.kernels.silu_mul.cpu import silu_mul


def gated_mlp(x_TH: Tensor, gate_up: Tensor, down: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """As the reference, up to rounding; both weights may be packed."""
    return linear(gated_hidden(x_TH, gate_up), down, add_to=add_to)


def gated_hidden(x_TH: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate(x)) * up(x): [T, I]."""
    if gate_up.dim() == 2:
        gate_TI, up_TI = linear(x_TH, gate_up).chunk(2, dim=-1)
        return silu_mul(gate_TI, up_TI)
    # Blocks [gate | up] apart: the halves of the product need no copy.
    gate_BTb, up_BTb = packed_product(x_TH, gate_up).chunk(2)
    half, T, block = gate_BTb.shape
    return silu_mul(gate_BTb, up_BTb).transpose(0, 1).reshape(T, half * block)
