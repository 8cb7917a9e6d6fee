"""rms_norm: root mean square normalisation of the last axis."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps): the normalisation in fp32, rounded, then the weight.

    As transformers' RMSNorm modules do it. `out` may be x itself.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return torch.mul(weight, (wide * scale).to(x.dtype), out=out)
