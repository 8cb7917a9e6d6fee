"""The double's own fp8 cast and the layouts of scales that low-latency mode hands out.

Written apart from the adapter's `fp8`, so that the tests compare two. C places, H hidden, L experts.
"""

import torch
from torch import Tensor

from tests.expert_parallel.deepep.double.events import garbage


def cast(x_TH: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
    """e4m3 [T, H] and fp32 scales [T, H / 128]; rounded scales are the next power of two."""
    T, H = x_TH.shape
    blocks = x_TH.float().reshape(T, H // 128, 128)
    largest = blocks.abs().amax(-1).clamp(min=1e-4)
    scales = largest / 448.0
    if round_scale:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
        factors = 1.0 / scales
    else:
        factors = 448.0 / largest
    return (blocks * factors[..., None]).to(torch.float8_e4m3fn).reshape(T, H), scales


def allocate(experts: int, places: int, hidden: int, *, ue8m0: bool) -> Tensor:
    """[L, C, H / 128] fp32 or [L, C, H / 512] int32, stored column by column as TMA wants it."""
    width, dtype = (hidden // 512, torch.int32) if ue8m0 else (hidden // 128, torch.float32)
    return garbage((experts, width, places), dtype).transpose(1, 2)


def cast_scales(scales_TG: Tensor, *, ue8m0: bool) -> Tensor:
    """As they are, or four biased exponents to an int32, the first group in the lowest byte."""
    if not ue8m0:
        return scales_TG
    exponents = (scales_TG.contiguous().view(torch.int32) >> 23).view(
        *scales_TG.shape[:-1], scales_TG.shape[-1] // 4, 4
    )
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
    packed: Tensor = (exponents << shifts).sum(-1).int()
    return packed
