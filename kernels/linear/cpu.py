"""linear on a CPU, for plain [N, K] and for packed [blocks, K, b] weights (see `pack`).

Packed products use all threads whatever the number of rows; results differ from the reference by
rounding only (other order of summation).
"""

from torch import Tensor
from torch.nn import functional as F


def linear(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None = None, *, add_to: Tensor | None = None
) -> Tensor:
    """As the reference, up to rounding; `weight` may be packed."""
    if weight.dim() == 2:
        return _plain(x_TK, weight, bias_N, add_to)
    y_TBb = packed_product(x_TK, weight).transpose(0, 1)
    if bias_N is not None:
        y_TBb = y_TBb + bias_N.view(y_TBb.shape[1:])
    if add_to is None:
        return y_TBb.reshape(x_TK.shape[0], weight.shape[0] * weight.shape[2])
    add_to.view(y_TBb.shape).add_(y_TBb)
    return add_to


def _plain(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, add_to: Tensor | None) -> Tensor:
    if add_to is None:
        return F.linear(x_TK, weight_NK, bias_N)
    add_to.addmm_(x_TK, weight_NK.t())
    return add_to if bias_N is None else add_to.add_(bias_N)


def packed_product(x_TK: Tensor, weight_BKb: Tensor) -> Tensor:
    """x W^T as [blocks, T, b]."""
    return x_TK.unsqueeze(0).expand(weight_BKb.shape[0], -1, -1).bmm(weight_BKb)
