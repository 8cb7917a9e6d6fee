"""gated_mlp on a CPU: gate and up in one product, laid out so that the halves need no copy."""

from torch import Tensor

from moe_runtime.kernels.linear.cpu import SWAP_ROWS, linear, split_blocks, split_product, swapped_product
from moe_runtime.kernels.silu_mul.cpu import silu_mul


def gated_mlp(x_TH: Tensor, gate_up_2IH: Tensor, down_HI: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """As the reference, up to rounding."""
    return linear(gated_hidden(x_TH, gate_up_2IH), down_HI, add_to=add_to)


def gated_hidden(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """silu(gate(x)) * up(x): contiguous [T, I]."""
    T, inter = x_TH.shape[0], gate_up_2IH.shape[0] // 2
    blocks = split_blocks(2 * inter, T, x_TH.dtype)
    if blocks < 2:
        gate_TI, up_TI = linear(x_TH, gate_up_2IH).chunk(2, dim=-1)
        return silu_mul(gate_TI, up_TI)
    if T <= SWAP_ROWS:
        y = swapped_product(x_TH, gate_up_2IH, blocks).view(2, inter, T)
        return silu_mul(y[0], y[1]).t().contiguous()
    half = blocks // 2
    y = split_product(x_TH, gate_up_2IH, blocks).view(2, half, T, inter // half)
    return silu_mul(y[0], y[1]).transpose(0, 1).reshape(T, inter)
