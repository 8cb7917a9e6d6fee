"""Next tokens from logits. Noise is a function of (seed, output position) and of nothing else,
so the same request gives the same tokens on any rank, in any batch, before and after a handoff.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def noise_seed(seed: int, position: int) -> int:
    """A 63-bit generator seed for one output position (splitmix64's finaliser over both)."""
    z = (seed * _MIX + position + 1) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def sample(
    logits_NV: Tensor,
    temperature_N: NDArray[np.float32],
    seed_N: NDArray[np.int64],
    output_position_N: NDArray[np.int32],
) -> Tensor:
    """int64 [N] token ids: argmax where the temperature is 0, else by the Gumbel-max rule.

    `logits_NV` is float32 [N, V].
    """
    tokens_N = logits_NV.argmax(dim=-1)
    for n in np.flatnonzero(temperature_N > 0):
        generator = torch.Generator().manual_seed(noise_seed(int(seed_N[n]), int(output_position_N[n])))
        exponential = torch.empty(logits_NV.shape[1]).exponential_(generator=generator)
        # The largest logit becomes 0, so that no temperature, however small, overflows.
        scaled = (logits_NV[n] - logits_NV[n].max()) / float(temperature_N[n])
        tokens_N[n] = (scaled - exponential.log().to(scaled.device)).argmax()
    return tokens_N
