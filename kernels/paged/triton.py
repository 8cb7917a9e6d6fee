"""What the Triton attention kernels share: plans, and the kernel that joins the splits of a sequence.

A decode plan holds tensors of fixed shapes and no number that the device would have to tell the host, so the
launches it leads to can be captured into a graph. A prefill plan is made of host numbers and sent to the
device once.

Decode cuts a sequence into splits of fixed length, counted from its first token, so that how a row is
summed depends on its own length alone. A split leaves its normalised output and the base-2 logarithm of
its sum of exponentials; a sequence of one split needs neither. D decode rows, A heads, V values per head,
B blocks per sequence, S tokens per block, N blocks of all segments together, W tiles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.paged.reference import Segment

QUERY_TILE = 128  # rows of a segment that one program attends
TILE_FIELDS = 5
LOG2_E = tl.constexpr(1.4426950408889634)  # the kernels' exponentials have base 2


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Block tables int32 [D, B] and lengths int32 [D], contiguous; `max_context` bounds the splits."""

    blocks_DB: Tensor
    context_D: Tensor
    max_context: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Tiles of up to QUERY_TILE query rows, longest first, and the blocks of all segments, joined.

    blocks_N   int32: segment by segment, only blocks that hold tokens
    tiles_WF   int32 [W, 5]: first row, rows, position of the first row in its sequence, first block
               in `blocks_N`, tokens of the sequence
    """

    blocks_N: Tensor
    tiles_WF: Tensor
    block_tokens: int


def plan_decode(blocks_DB: Tensor, context_D: Tensor, *, max_context: int, block_tokens: int) -> DecodePlan:
    """As the reference. A context of 0 is allowed (the padding of a captured batch): its row becomes zero."""
    if not 16 <= block_tokens <= 64:
        raise KernelError(f"block_tokens is {block_tokens}, the kernels take 16 to 64")
    return DecodePlan(
        blocks_DB.to(torch.int32).contiguous(), context_D.to(torch.int32).contiguous(), max_context
    )


def plan_prefill(segments: Sequence[Segment], *, block_tokens: int) -> PrefillPlan:
    """As the reference; the tiles are laid out on the host and copied without waiting for the device."""
    if not segments:
        empty = torch.empty(0, dtype=torch.int32)
        return PrefillPlan(empty, empty.view(0, TILE_FIELDS), block_tokens)
    blocks, tiles, first = [], [], 0
    for segment in segments:
        total = segment.context + segment.stop - segment.start
        used = -(-total // block_tokens)
        blocks.append(segment.blocks[:used])
        for start in range(segment.start, segment.stop, QUERY_TILE):
            rows = min(QUERY_TILE, segment.stop - start)
            tiles.append((start, rows, segment.context + start - segment.start, first, total))
        first += used
    tiles.sort(key=lambda tile: -tile[2])  # stable; the longest work begins first
    host = torch.from_numpy(np.array(tiles, dtype=np.int32).reshape(-1, TILE_FIELDS))
    device = blocks[0].device
    if device.type == "cuda":
        host = host.pin_memory()
    return PrefillPlan(torch.cat(blocks).to(torch.int32), host.to(device, non_blocking=True), block_tokens)


def check_layout(q_TAx: Tensor, cache_BSE: Tensor, out_TX: Tensor, sinks_A: Tensor | None = None) -> None:
    """KernelError unless tensors lie as the kernels read and write them: only queries may have strides."""
    if q_TAx.stride(-1) != 1:
        raise KernelError("the values of a query head must be contiguous")
    if not (cache_BSE.is_contiguous() and out_TX.is_contiguous()):
        raise KernelError("cache and output must be contiguous")
    if sinks_A is not None and not (sinks_A.is_contiguous() and sinks_A.dtype is torch.float32):
        raise KernelError("sinks must be contiguous, in float32")


def empty_splits(
    rows: int, heads: int, splits: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Outputs [D, A, splits, V] and logarithms [D, A, splits] of the splits, fp32, uninitialised."""
    return (
        torch.empty(rows, heads, splits, width, dtype=torch.float32, device=device),
        torch.empty(rows, heads, splits, dtype=torch.float32, device=device),
    )


def join_splits(
    parts_DAPV: Tensor,
    logs_DAP: Tensor,
    context_D: Tensor,
    *,
    split_tokens: int,
    window: int,
    out_DAV: Tensor,
) -> None:
    """Weigh the splits of every sequence that has several into `out`; other rows are left alone.

    `window` 0: all tokens; otherwise only the last `window` tokens count, and split 0 is the first that
    holds one of them.
    """
    D, A, splits, V = parts_DAPV.shape
    _join_splits[(A, D)](
        parts_DAPV,
        logs_DAP,
        context_D,
        out_DAV,
        A,
        splits,
        V=V,
        SPLIT=split_tokens,
        WINDOW=window,
        num_warps=_join_warps(V),
        enable_fp_fusion=True,
    )


def _join_warps(width: int) -> int:
    """16 bytes per thread."""
    return max(1, width // 128)


@triton.jit
def split_range(context, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """First split that holds an attended token, the number of such splits (at least 1), first such token."""
    first_token = tl.maximum(context - WINDOW, 0) if WINDOW else 0
    first = first_token // SPLIT
    return first, tl.maximum(tl.cdiv(context, SPLIT) - first, 1), first_token


@triton.jit(do_not_specialize=("A", "splits"))
def _join_splits(
    parts_ptr,
    logs_ptr,
    context_ptr,
    out_ptr,
    A,
    splits,
    V: tl.constexpr,  # a power of two
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    row = tl.program_id(1)
    _, used, _ = split_range(tl.load(context_ptr + row), SPLIT, WINDOW)
    if used == 1:
        return
    head = row.to(tl.int64) * A + tl.program_id(0)
    v = tl.arange(0, V)
    parts = parts_ptr + head * splits * V + v
    largest = tl.load(logs_ptr + head * splits)
    for s in range(1, used):
        largest = tl.maximum(largest, tl.load(logs_ptr + head * splits + s))
    total = largest * 0.0
    out = tl.zeros([V], tl.float32)
    for s in range(used):
        weight = tl.exp2(tl.load(logs_ptr + head * splits + s) - largest)
        total += weight
        out += weight * tl.load(parts + s * V)
    tl.store(out_ptr + head * V + v, (out / total).to(out_ptr.dtype.element_ty))


def aot_cases(target: Target) -> Iterator[AotCase]:
    """The join of latents and of GQA heads, in the lengths that the two launchers cut."""
    del target
    latents, heads = shapes.DEEPSEEK_V3.latent_rank, shapes.QWEN3_235B.head_dim
    for width, split_tokens, window in ((latents, 1024, 0), (heads, 512, 0), (heads, 512, 128)):
        yield AotCase(
            operation="paged",
            label=f"join {width} x {split_tokens}" + f" window {window}" * (window > 0),
            kernel=_join_splits,
            signature={
                "parts_ptr": "*fp32",
                "logs_ptr": "*fp32",
                "context_ptr": "*i32",
                "out_ptr": "*bf16",
                "A": "i32",
                "splits": "i32",
            },
            constants={"V": width, "SPLIT": split_tokens, "WINDOW": window},
            aligned=frozenset({"parts_ptr", "logs_ptr", "context_ptr", "out_ptr"}),
            num_warps=_join_warps(width),
        )
