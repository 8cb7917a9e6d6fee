"""The gated MLP of dense layers and of shared experts. T rows, H hidden, I intermediate."""

import torch
from torch import Tensor, nn

from moe_runtime.models.ops import Ops
from moe_runtime.models.parameters import Weight


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are rows of one parameter."""

    def __init__(
        self, hidden: int, intermediate: int, *, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._ops = ops
        self.gate_up_proj = Weight(2 * intermediate, hidden, dtype=dtype, device=device)
        self.down_proj = Weight(hidden, intermediate, dtype=dtype, device=device)

    def prepare(self) -> None:
        """Pack the weights."""
        self.gate_up_proj.pack(self._ops.pack, parts=2)
        self.down_proj.pack(self._ops.pack)

    def forward(self, h_TH: Tensor, *, add_to: Tensor) -> Tensor:
        """`add_to` [T, H] plus the MLP's output, in place."""
        result: Tensor = self._ops.gated_mlp(
            h_TH, self.gate_up_proj.weight, self.down_proj.weight, add_to=add_to
        )
        return result
