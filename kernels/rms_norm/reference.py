"""rms_norm: root mean square normalisation of the last axis."""

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps): the normalisation in fp32, rounded, then the weight.

    As transformers' RMSNorm modules do it. `out` may be x itself. With `residual` (of x's shape) x is
    first added to it, in place, and the sum is normalised.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return torch.mul(weight, (wide * scale).to(x.dtype), out=out)
