"""gated_mlp: down(silu(gate(x)) * up(x)), the MLP of dense layers, shared experts and experts.

T rows, H hidden, I intermediate.
"""

from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels.silu_mul.reference import silu_mul


def gated_mlp(x_TH: Tensor, gate_up_2IH: Tensor, down_HI: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """[T, H]. `gate_up` has the gate's rows, then up's. With `add_to` [T, H] the result is added to it."""
    gate_TI, up_TI = F.linear(x_TH, gate_up_2IH).chunk(2, dim=-1)
    y_TH = F.linear(silu_mul(gate_TI, up_TI), down_HI)
    return y_TH if add_to is None else add_to.add_(y_TH)
