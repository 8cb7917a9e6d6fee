"""gated_mlp on a CPU, batch-invariant (see `fixed_rows`)."""

from torch import Tensor

from moe_runtime.kernels import fixed_rows


def gated_mlp(x_TH: Tensor, gate_up_2IH: Tensor, down_HI: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """As the reference, up to rounding."""
    y_TH = fixed_rows.gated_mlp(x_TH, gate_up_2IH, down_HI)
    return y_TH if add_to is None else add_to.add_(y_TH)
