"""rms_norm on a CPU: one reduction, two products."""

import torch
from torch import Tensor

from moe_runtime.kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As the reference, up to the rounding of the mean (relative 1e-6) in float32; else the reference."""
    if x.dtype is not torch.float32:
        return reference.rms_norm(x, weight, eps, out=out)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x * scale, weight, out=out)
