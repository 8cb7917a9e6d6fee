"""linear: y = x W^T (+ bias), optionally added onto a residual in place.

T rows, K inputs, N outputs.
"""

from torch import Tensor
from torch.nn import functional as F


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, add_to: Tensor | None = None
) -> Tensor:
    """[T, N] in the dtype of x. With `add_to` [T, N] the product is added to it, and it is returned."""
    y_TN = F.linear(x_TK, weight_NK, bias_N)
    return y_TN if add_to is None else add_to.add_(y_TN)
