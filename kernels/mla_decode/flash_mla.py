"""mla_decode by FlashMLA's dense kernel: Hopper only, blocks of 64 tokens, 16-bit caches of 512 + 64 values.

Owns the calls into `flash_mla` (imported when first used; its calls' names are checked) and nothing else:
the products before and after are the Triton ones. FlashMLA
spreads a batch over the multiprocessors by the lengths of all its sequences, so that a row's rounding depends
on its batch: not for the deterministic mode. Interface: flash_mla_interface.py of FlashMLA, in 2025's form
with two metadata tensors as well as in 2026's with one object that its first call fills.
"""

import inspect
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.mla_decode.per_head.triton import multiply_per_head
from moe_runtime.kernels.mla_decode.reference import split_kv_b

BLOCK_TOKENS = 64
RANK = 512
ROPE = 64
_ARGUMENTS = (
    "q",
    "k_cache",
    "block_table",
    "cache_seqlens",
    "head_dim_v",
    "tile_scheduler_metadata",
    "num_splits",
    "softmax_scale",
    "causal",
)


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """Block tables int32 [D, B] and lengths int32 [D] of a step; `schedules`, filled by its first layer, is
    FlashMLA's own distribution of the work per number of heads."""

    blocks_DB: Tensor
    context_D: Tensor
    schedules: dict[int, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlashMla:
    """Decode on the installed library; made by `load`. Plan and attention go together."""

    library: Any

    def plan_decode(
        self, blocks_DB: Tensor, context_D: Tensor, *, max_context: int, block_tokens: int
    ) -> FlashPlan:
        """As the reference. KernelError for blocks of another size."""
        del max_context
        if block_tokens != BLOCK_TOKENS:
            raise KernelError(f"block_tokens is {block_tokens}, FlashMLA takes {BLOCK_TOKENS}")
        return FlashPlan(blocks_DB.to(torch.int32).contiguous(), context_D.to(torch.int32).contiguous())

    def mla_decode(
        self,
        q_DAQ: Tensor,
        cache_BSE: Tensor,
        plan: FlashPlan,
        kv_b_proj: Tensor,
        scale: float,
        *,
        out_DX: Tensor,
    ) -> None:
        """As the reference, up to rounding. KernelError for a cache that FlashMLA does not take."""
        if cache_BSE.shape[1:] != (BLOCK_TOKENS, RANK + ROPE) or cache_BSE.itemsize != 2:
            raise KernelError(
                f"the cache is {cache_BSE.dtype} {tuple(cache_BSE.shape)}, "
                f"FlashMLA takes 16-bit [blocks, {BLOCK_TOKENS}, {RANK + ROPE}]"
            )
        w_uk, w_uv = split_kv_b(kv_b_proj, q_DAQ, cache_BSE)
        (D, A, _), nope = q_DAQ.shape, w_uk.shape[1]
        if not D:
            return
        q_D1AE = q_DAQ.new_empty(D, 1, A, RANK + ROPE)
        multiply_per_head(q_DAQ[..., :nope], w_uk, q_D1AE[:, 0, :, :RANK])
        q_D1AE[:, 0, :, RANK:] = q_DAQ[..., nope:]
        if A not in plan.schedules:
            plan.schedules[A] = self.library.get_mla_metadata(plan.context_D, A, 1)
        metadata, num_splits = plan.schedules[A]
        latent_D1AR, _ = self.library.flash_mla_with_kvcache(
            q_D1AE,
            cache_BSE.unsqueeze(2),
            plan.blocks_DB,
            plan.context_D,
            RANK,
            metadata,
            num_splits,
            softmax_scale=scale,
            causal=False,
        )
        multiply_per_head(latent_D1AR[:, 0], w_uv.transpose(1, 2), out_DX.view(D, A, -1))


def load() -> FlashMla:
    """KernelError if `flash_mla` is not installed or has another interface."""
    try:
        module = import_module("flash_mla")
    except ImportError as error:
        raise KernelError(
            f"{error}: install FlashMLA from its source, https://github.com/deepseek-ai/FlashMLA"
        ) from error
    have = tuple(inspect.signature(module.flash_mla_with_kvcache).parameters)
    if have[: len(_ARGUMENTS)] != _ARGUMENTS:
        raise KernelError(f"flash_mla_with_kvcache takes {', '.join(have)}; expected {', '.join(_ARGUMENTS)}")
    return FlashMla(module)
