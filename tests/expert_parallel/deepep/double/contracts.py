"""What DeepEP demands of its callers, as checks: dtype, shape, alignment, order of calls.

Each raises ContractBreach with the demand in words. T tokens, K top-k, H hidden, E experts, R ranks.
"""

from typing import NoReturn

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
Rows = Tensor | tuple[Tensor, Tensor]


class ContractBreach(Exception):  # noqa: N818 - it is what happened, not what the caller handles
    """A call that DeepEP refuses, or silently answers with garbage."""


class DeviceTrap(RuntimeError):
    """What a timed-out kernel does to a process: its CUDA context is lost."""


def breach(message: str) -> NoReturn:
    raise ContractBreach(message)


def require(holds: bool, message: str) -> None:
    if not holds:
        breach(message)


def tensor(name: str, value: Tensor, *, dtype: torch.dtype, dim: int) -> None:
    """dtype, rank and contiguity of one argument."""
    require(isinstance(value, Tensor), f"{name} must be a tensor")
    require(value.dtype == dtype, f"{name} must be {dtype}, it is {value.dtype}")
    require(value.dim() == dim, f"{name} must have {dim} dimensions, it has {value.dim()}")
    require(value.is_contiguous(), f"{name} must be contiguous")


def rows(x: Rows, *, multiple_of_bytes: int) -> tuple[Tensor, Tensor | None]:
    """bf16 [T, H], or (e4m3 [T, H], fp32 [T, H / 128]); a row is whole units of `multiple_of_bytes`."""
    values, scales = x if isinstance(x, tuple) else (x, None)
    tensor("x", values, dtype=torch.bfloat16 if scales is None else FP8, dim=2)
    T, H = values.shape
    size = H * values.element_size()
    require(size % multiple_of_bytes == 0, f"a row of x has {size} bytes, no multiple of {multiple_of_bytes}")
    if scales is not None:
        require(H % 128 == 0, f"hidden = {H} must be a multiple of 128 with fp8")
        require(scales.dtype == torch.float32, f"scales must be fp32, they are {scales.dtype}")
        require(scales.shape == (T, H // 128), f"scales must be [{T}, {H // 128}]")
    return values, scales


def top_k(topk_idx: Tensor, *, tokens: int, experts: int, ranks: int, most: int, dtype: torch.dtype) -> None:
    """Expert ids [T, K]: -1 or 0..E-1, those of a token distinct; E a multiple of R."""
    tensor("topk_idx", topk_idx, dtype=dtype, dim=2)
    T, K = topk_idx.shape
    require(tokens == T, f"topk_idx has {T} rows, x has {tokens}")
    require(most >= K, f"top-k = {K} must be at most {most}")
    require(experts % ranks == 0, f"num_experts = {experts} must be a multiple of the {ranks} ranks")
    if T == 0:
        return
    low, high = int(topk_idx.min()), int(topk_idx.max())
    require(
        low >= -1 and high < experts, f"topk_idx holds ids in {low}..{high}, allowed are -1..{experts - 1}"
    )
    ordered = topk_idx.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not bool(twice.any()), "the experts of a token must be distinct")


def weights(topk_weights: Tensor, like: Tensor) -> None:
    tensor("topk_weights", topk_weights, dtype=torch.float32, dim=2)
    require(topk_weights.shape == like.shape, "topk_weights must have the shape of topk_idx")


def not_deterministic_with_fill() -> None:
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    require(
        not (fills and torch.are_deterministic_algorithms_enabled()),
        "torch's deterministic mode with fill_uninitialized_memory races with communication",
    )
