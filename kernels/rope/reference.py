"""rope: rotary position embedding, and its table.

Two ways to pair the `dim` rotated values of a head: interleaved (2i, 2i+1), as DeepSeek stores
them, and halves (i, i + dim/2), as GPT-NeoX does. P positions, T rows, A heads, d = dim / 2.
"""

import math

import torch
from torch import Tensor


def rope_table(
    *,
    dim: int,
    max_positions: int,
    theta: float,
    interleaved: bool,
    factor: float = 1.0,
    original_max_positions: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    cos_sin_scale: float = 1.0,
) -> Tensor:
    """fp32 [max_positions, dim]: cos and sin of position * frequency, times `cos_sin_scale`.

    Interleaved: cos_0, sin_0, cos_1, sin_1, ...; halves: all d cosines, then all d sines.
    """
    frequency_d = inverse_frequencies(
        dim=dim,
        theta=theta,
        factor=factor,
        original_max_positions=original_max_positions,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
    )
    angle_Pd = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequency_d
    cos_Pd, sin_Pd = angle_Pd.cos() * cos_sin_scale, angle_Pd.sin() * cos_sin_scale
    if interleaved:
        return torch.stack((cos_Pd, sin_Pd), dim=-1).view(max_positions, dim)
    return torch.cat((cos_Pd, sin_Pd), dim=-1)


def inverse_frequencies(
    *,
    dim: int,
    theta: float,
    factor: float,
    original_max_positions: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Tensor:
    """fp32 [dim / 2]: theta ** (-2 i / dim), with YaRN between them and their interpolation if factor > 1.

    YaRN (arXiv 2309.00071, section 3.2) keeps dimensions that turn more than `beta_fast` times in
    the original context, divides those that turn less than `beta_slow` times by `factor`, and
    ramps linearly between. The arithmetic is that of transformers' _compute_yarn_parameters.
    """
    power_d = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if factor <= 1.0:
        return 1.0 / power_d

    def dimension_that_turns(times: float) -> float:
        return dim * math.log(original_max_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_that_turns(beta_fast), dimension_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept_d = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1.0 / (factor * power_d)) * (1 - kept_d) + (1.0 / power_d) * kept_d


def rope(x_TAD: Tensor, cos_sin_TD: Tensor, *, interleaved: bool) -> None:
    """Rotate x [T, A, dim] in place (it may be a view); `cos_sin` [T, dim] are rows of the table.

    Computed in fp32, rounded once.
    """
    d = x_TAD.shape[-1] // 2
    if interleaved:
        a, b = x_TAD[..., 0::2].float(), x_TAD[..., 1::2].float()
        cos, sin = cos_sin_TD[:, None, 0::2], cos_sin_TD[:, None, 1::2]
    else:
        a, b = x_TAD[..., :d].float(), x_TAD[..., d:].float()
        cos, sin = cos_sin_TD[:, None, :d], cos_sin_TD[:, None, d:]
    first, second = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    x_TAD.copy_(rotated)
