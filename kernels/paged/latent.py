"""A latent cache whose latents are stored as e4m3: the layout of a token's bytes, packing and unpacking.

Owns the format and its plain torch arithmetic; kernels take only its sizes. A cache of dtype uint8 holds
this format, any other dtype holds entries (latent, then rope) as they are. Per token, R the latent rank:

    R bytes            e4m3, one after the other
    4 * ceil(R / 128)  fp32 scales, one per 128 latent values: value = e4m3 * scale
    2 * rope           bf16, not quantised

With R 512 and rope 64 these are the 656 bytes of FlashMLA's "FP8 with scale" format (its README), whose
scales are powers of two as well: so e4m3 * scale is exact in bf16. T tokens, E = R + rope, X bytes.
"""

import torch
from torch import Tensor

from moe_runtime.kernels.errors import KernelError

GROUP = 128
SMALLEST_SCALE_SOURCE = 1e-4  # FlashMLA's floor of largest / 448 before it is rounded up


def row_bytes(rank: int, rope: int) -> int:
    """Bytes of a token."""
    return rank + 4 * -(-rank // GROUP) + 2 * rope


def rank_of(entry: int, num_bytes: int) -> int:
    """The latent rank of entries of `entry` values that are packed into rows of `num_bytes`.

    Ranks are multiples of 16. KernelError if there is none.
    """
    for groups in range(1, entry // GROUP + 2):
        rank = 2 * entry - num_bytes + 4 * groups
        if 0 < rank < entry and -(-rank // GROUP) == groups and rank % 16 == 0:
            return rank
    raise KernelError(f"entries of {entry} values do not pack into rows of {num_bytes} bytes")


def rope_dim(cache_BSE: Tensor, rank: int) -> int:
    """Values of the rope part of an entry, in either kind of cache."""
    width = cache_BSE.shape[2]
    return (width - row_bytes(rank, 0)) // 2 if cache_BSE.dtype == torch.uint8 else width - rank


def e4m3(device: torch.device) -> torch.dtype:
    """The chip's e4m3: gfx942 computes with the fnuz variant, every other chip with OCP's."""
    if device.type == "cuda" and torch.version.hip is not None:
        arch: str = torch.cuda.get_device_properties(device).gcnArchName
        if arch.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def pack(entries_TE: Tensor, rank: int) -> Tensor:
    """uint8 [T, X]: entries quantised. A group's scale is the power of two at or above largest / 448."""
    kind = e4m3(entries_TE.device)
    T, groups = entries_TE.shape[0], -(-rank // GROUP)
    latent_TgG = entries_TE.new_zeros(T, groups * GROUP, dtype=torch.float32)
    latent_TgG[:, :rank] = entries_TE[:, :rank]
    latent_TgG = latent_TgG.view(T, groups, GROUP)
    source_Tg = (latent_TgG.abs().amax(-1) * (1.0 / torch.finfo(kind).max)).clamp_min(SMALLEST_SCALE_SOURCE)
    mantissa, exponent = torch.frexp(source_Tg)
    scale_Tg = torch.ldexp(torch.ones_like(source_Tg), exponent - (mantissa == 0.5).int())
    quantised_TR = (latent_TgG / scale_Tg.unsqueeze(-1)).to(kind).flatten(1)[:, :rank]
    rope = entries_TE[:, rank:].to(torch.bfloat16).contiguous()
    parts = (quantised_TR.contiguous(), scale_Tg.contiguous(), rope)
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def unpack(rows_TX: Tensor, rank: int) -> Tensor:
    """fp32 [T, E]: what packed rows stand for."""
    scales_end = row_bytes(rank, 0)
    latent_TR = rows_TX[:, :rank].contiguous().view(e4m3(rows_TX.device)).float()
    scale_Tg = rows_TX[:, rank:scales_end].contiguous().view(torch.float32)
    rope = rows_TX[:, scales_end:].contiguous().view(torch.bfloat16).float()
    return torch.cat((latent_TR * scale_Tg.repeat_interleave(GROUP, 1)[:, :rank], rope), 1)


def entries(rows_TX: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """[T, E] of `dtype` from rows of either kind of cache."""
    return unpack(rows_TX, rank).to(dtype) if rows_TX.dtype == torch.uint8 else rows_TX.to(dtype)
