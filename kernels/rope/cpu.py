"""rope on a CPU: interleaved pairs are complex numbers, and rotating is one product in place."""

import torch
from torch import Tensor

from moe_runtime.kernels.rope import reference


def rope(x_TAD: Tensor, cos_sin_TD: Tensor, *, interleaved: bool) -> None:
    """As the reference, up to one rounding."""
    places = (x_TAD.storage_offset(), *x_TAD.stride()[:-1])
    if not interleaved or x_TAD.dtype is not torch.float32 or any(place % 2 for place in places):
        reference.rope(x_TAD, cos_sin_TD, interleaved=interleaved)
        return
    T, A, dim = x_TAD.shape
    turn_T1d = torch.view_as_complex(cos_sin_TD.view(T, 1, dim // 2, 2))
    torch.view_as_complex(x_TAD.view(T, A, dim // 2, 2)).mul_(turn_T1d)
