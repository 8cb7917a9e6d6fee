"""linear on a CPU, batch-invariant (see `fixed_rows`)."""

from torch import Tensor

from moe_runtime.kernels.fixed_rows import product


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, add_to: Tensor | None = None
) -> Tensor:
    """As the reference, up to rounding."""
    y_TN = product(x_TK, weight_NK)
    if bias_N is not None:
        y_TN += bias_N
    return y_TN if add_to is None else add_to.add_(y_TN)
