"""Parameters of the decoder: allocated, never trained, filled by the loader."""

import torch
from torch import Tensor, nn

from moe_runtime.kernels.registry import Kernel


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Weight(nn.Module):
    """A named place for one tensor, `weight`, and perhaps a `bias`: a projection, a norm, an embedding.

    The arithmetic is not here: modules hand these tensors to kernels.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(*shape, dtype=dtype, device=device)
        self.bias = empty_parameter(shape[0], dtype=dtype, device=device) if bias else None

    def pack(self, pack: Kernel, *, parts: int = 1) -> None:
        """Lay the weight out as the device's products like it; once, when it is filled."""
        self.weight.data = pack(self.weight.data, parts=parts)
