"""kv_gather and kv_scatter: blocks of a paged cache to and from a contiguous buffer, for transfers.

Bits are copied, nothing is converted. S tokens per block, E values per entry, N blocks.
"""

import torch
from torch import Tensor

from moe_runtime.kernels.errors import KernelError


def kv_gather(cache_BSE: Tensor, blocks_N: Tensor, *, out_NSE: Tensor) -> None:
    """out[n] = cache[blocks[n]]."""
    check(cache_BSE, blocks_N, out_NSE)
    torch.index_select(as_bytes(cache_BSE), 0, blocks_N, out=as_bytes(out_NSE))


def kv_scatter(cache_BSE: Tensor, blocks_N: Tensor, entries_NSE: Tensor) -> None:
    """cache[blocks[n]] = entries[n]; no block may occur twice."""
    check(cache_BSE, blocks_N, entries_NSE)
    as_bytes(cache_BSE).index_copy_(0, blocks_N, as_bytes(entries_NSE))


def check(cache_BSE: Tensor, blocks_N: Tensor, entries_NSE: Tensor) -> None:
    """KernelError unless the buffer holds N blocks of the cache's shape and dtype, both contiguous."""
    wanted = (len(blocks_N), *cache_BSE.shape[1:])
    if entries_NSE.shape != wanted or entries_NSE.dtype != cache_BSE.dtype:
        raise KernelError(
            f"the buffer is {entries_NSE.dtype} {tuple(entries_NSE.shape)}, "
            f"the blocks are {cache_BSE.dtype} {wanted}"
        )
    if not (cache_BSE.is_contiguous() and entries_NSE.is_contiguous()):
        raise KernelError("cache and buffer must be contiguous")


def as_bytes(x_BSE: Tensor) -> Tensor:
    """uint8 [blocks, bytes of a block], a view: copying it keeps every bit, NaN payloads included."""
    return x_BSE.view(torch.uint8).flatten(1)
