"""kv_gather and kv_scatter in Triton: one program copies a part of one block as 32-bit words."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.kv_gather.reference import as_bytes, check

WORDS = 4096  # per program


@triton.jit
def _copy_blocks(cache_ptr, blocks_ptr, buffer_ptr, words, GATHER: tl.constexpr, WORDS: tl.constexpr):
    n = tl.program_id(0)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    block = tl.load(blocks_ptr + n).to(tl.int64)
    in_cache = cache_ptr + block * words + at
    in_buffer = buffer_ptr + n.to(tl.int64) * words + at
    if GATHER:
        tl.store(in_buffer, tl.load(in_cache, mask=at < words), mask=at < words)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=at < words), mask=at < words)


def kv_gather(cache_BSE: Tensor, blocks_N: Tensor, *, out_NSE: Tensor) -> None:
    """As the reference, bit for bit."""
    _copy(cache_BSE, blocks_N, out_NSE, gather=True)


def kv_scatter(cache_BSE: Tensor, blocks_N: Tensor, entries_NSE: Tensor) -> None:
    """As the reference, bit for bit."""
    _copy(cache_BSE, blocks_N, entries_NSE, gather=False)


def _copy(cache_BSE: Tensor, blocks_N: Tensor, buffer_NSE: Tensor, *, gather: bool) -> None:
    check(cache_BSE, blocks_N, buffer_NSE)
    cache, buffer = as_bytes(cache_BSE), as_bytes(buffer_NSE)
    if cache.shape[1] % 4:
        raise KernelError(f"a block has {cache.shape[1]} bytes, which must be a multiple of 4")
    words = cache.shape[1] // 4
    if not len(blocks_N):
        return
    _copy_blocks[(len(blocks_N), triton.cdiv(words, WORDS))](
        cache.view(torch.int32), blocks_N, buffer.view(torch.int32), words, GATHER=gather, WORDS=WORDS
    )


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Both directions; sizes of models are run-time numbers."""
    for gather in (True, False):
        yield AotCase(
            operation="kv_gather",
            label="gather" if gather else "scatter",
            kernel=_copy_blocks,
            signature={"cache_ptr": "*i32", "blocks_ptr": "*i64", "buffer_ptr": "*i32", "words": "i32"},
            constants={"GATHER": gather, "WORDS": WORDS},
            aligned=frozenset({"cache_ptr", "blocks_ptr", "buffer_ptr", "words"}),
            representative=gather and target.name == "sm_90",
        )
