"""Batch-invariant arithmetic on a CPU: a row's result does not depend on the rows beside it, bit for bit.

A library may sum in another order for another shape, so shapes are fixed here: ROWS rows per
product, zeros where there are fewer, and KEYS cache entries per step of attention. A library's
vector loops may round their last elements differently, so transcendental functions are numpy's,
whose loops do not. The number of threads has to stay the same.
T rows, K inputs, N outputs, A heads.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ROWS = 16
KEYS = 64
LANES = 16


def product(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x W^T: [T, N]."""
    N = weight_NK.shape[0]
    x_TK, weight_NK = filled(x_TK, -1), filled(filled(weight_NK, -1), -2)
    y_TN = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
    by_tile(lambda tile: tile @ weight_NK.t(), x_TK, out=y_TN)
    return y_TN[:, :N]


def product_per_head(x_TAK: Tensor, weight_AKN: Tensor) -> Tensor:
    """Head a of x times weight a: [T, A, N]."""
    N = weight_AKN.shape[2]
    x_TAK, weight_AKN = filled(x_TAK, -1), filled(filled(weight_AKN, -1), -2)
    y_TAN = x_TAK.new_empty(*x_TAK.shape[:2], weight_AKN.shape[2])
    by_tile(lambda tile: torch.bmm(tile.transpose(0, 1), weight_AKN).transpose(0, 1), x_TAK, out=y_TAN)
    return y_TAN[..., :N]


def filled(x: Tensor, axis: int) -> Tensor:
    """Zeros up to a multiple of LANES: narrow products take loops that depend on a row's alignment."""
    missing = -x.shape[axis] % LANES
    if not missing:
        return x
    shape = list(x.shape)
    shape[axis] = missing
    return torch.cat((x, x.new_zeros(shape)), axis)


def by_tile(function: Callable[[Tensor], Tensor], x: Tensor, *, out: Tensor) -> None:
    """`out[t] = function(tile of ROWS rows that has x[t])[its row]`; the tile is contiguous."""
    for begin in range(0, x.shape[0], ROWS):
        rows = slice(begin, min(begin + ROWS, x.shape[0]))
        missing = ROWS - (rows.stop - rows.start)
        tile = torch.cat((x[rows], x.new_zeros(missing, *x.shape[1:]))) if missing else x[rows].contiguous()
        out[rows] = function(tile)[: rows.stop - rows.start]


def exp(x: Tensor) -> Tensor:
    """fp32."""
    return torch.from_numpy(np.exp(x.float().numpy()))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, rounded to the dtype after each of the two."""
    with np.errstate(over="ignore"):  # exp(89) is inf, and 1 / inf the right answer
        return (gate.float() / (1 + exp(-gate))).to(gate.dtype) * up


def gated_mlp(x_TH: Tensor, gate_up_2IH: Tensor, down_HI: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)): [T, H]."""
    gate_TI, up_TI = product(x_TH, gate_up_2IH).chunk(2, dim=-1)
    return product(silu_mul(gate_TI, up_TI), down_HI)
