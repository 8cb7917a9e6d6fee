"""gqa_decode in Triton: a program takes one key/value head of one split of one sequence.

The query heads of a key/value head are the rows of its tile, padded to 16, so that every key and value is
read once. Reading is all that takes time here; mma.sync is fast enough for it. Softmax and sums are fp32,
and a row's result depends on its own sequence alone. Names as in the reference, S tokens per block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import GFX_942, AotCase, Target
from moe_runtime.kernels.chip import chip_of
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.paged.triton import (
    LOG2_E,
    DecodePlan,
    check_layout,
    empty_splits,
    join_splits,
    split_range,
)

SPLIT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Query heads x tokens that a program multiplies at a time."""

    heads: int
    tokens: int
    warps: int = 4
    stages: int = 3


def tile(group: int, *, itemsize: int, target: Target) -> Tile:
    """For `group` query heads per key/value head; every choice compiles without spilling."""
    heads = max(16, triton.next_power_of_2(group))
    if itemsize > 2:
        return Tile(heads=heads, tokens=16, stages=1)
    return Tile(heads=heads, tokens=64, stages=2 if target is GFX_942 else 3)


@triton.jit(do_not_specialize=("table_width", "splits"))
def _attend(
    q_ptr,
    cache_ptr,
    blocks_ptr,
    context_ptr,
    sinks_ptr,  # fp32
    out_ptr,  # [D, A, d], contiguous
    parts_ptr,
    logs_ptr,
    scale_log2,
    table_width,
    q_row_stride,
    q_head_stride,
    splits,
    S: tl.constexpr,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,  # query heads per key/value head
    DIM: tl.constexpr,  # a power of two
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    E: tl.constexpr = 2 * KV_HEADS * DIM
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(context_ptr + row)
    first_split, used, first_token = split_range(context, SPLIT, WINDOW)
    if split >= used:
        return
    begin = (first_split + split) * SPLIT
    end = tl.minimum(begin + SPLIT, context)
    if WINDOW:
        begin = tl.maximum(begin, first_token // BN * BN)

    g = tl.arange(0, BH)
    d = tl.arange(0, DIM)
    n = tl.arange(0, BN)
    real = (g < G)[:, None]
    h = kv_head * G + g
    q = tl.load(q_ptr + row * q_row_stride + h[:, None] * q_head_stride + d[None, :], mask=real, other=0.0)
    largest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    sums = tl.zeros([BH, DIM], tl.float32)
    # As in mla_decode: block numbers a tile ahead, one per tile if a block holds whole tiles.
    table = blocks_ptr + row * table_width
    last = tl.maximum(end - 1, 0)
    ahead = tl.arange(0, 1 if S % BN == 0 else BN)
    block = tl.load(table + tl.minimum(begin + ahead, last) // S)
    for first in range(begin, end, BN):
        token = first + n
        seen = token < end
        if WINDOW:
            seen = seen & (token >= first_token)
        at = block.to(tl.int64) * S + (first % S + n if S % BN == 0 else token % S)
        k_at = cache_ptr + at[:, None] * E + (kv_head * DIM + d)[None, :]
        k = tl.load(k_at, mask=seen[:, None], other=0.0).to(q.dtype)
        v = tl.load(k_at + KV_HEADS * DIM, mask=seen[:, None], other=0.0).to(q.dtype)
        block = tl.load(table + tl.minimum(first + BN + ahead, last) // S)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - larger)
        probs = tl.exp2(scores - larger[:, None])
        total = total * shrink + tl.sum(probs, 1)
        sums = tl.dot(probs.to(q.dtype), v, sums * shrink[:, None], input_precision="ieee")
        largest = larger
    if SINKS:
        sink = tl.where(split == 0, tl.load(sinks_ptr + h, mask=g < G, other=0.0) * LOG2_E, float("-inf"))
        larger = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.exp2(sink - larger)
        sums *= shrink[:, None]
        largest = larger
    # A row without tokens gives zeros.
    out = sums / tl.where(total > 0, total, 1.0)[:, None]
    heads = KV_HEADS * G
    if used == 1:
        out_at = out_ptr + row * heads * DIM + h[:, None] * DIM + d[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        part = h * splits + split
        tl.store(parts_ptr + row * heads * splits * DIM + part[:, None] * DIM + d[None, :], out, mask=real)
        tl.store(logs_ptr + row * heads * splits + part, largest + tl.log2(total), mask=g < G)


def gqa_decode(
    q_DAd: Tensor,
    cache_BSE: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    out_DX: Tensor,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> None:
    """As the reference; a row's result depends on its own sequence alone. Sinks are fp32."""
    check_layout(q_DAd, cache_BSE, out_DX, sinks_A)
    (D, A, d), (_, S, E) = q_DAd.shape, cache_BSE.shape
    kv_heads = E // (2 * d)
    if d & (d - 1) or d < 16:
        raise KernelError(f"head dimension {d} must be a power of two of at least 16")
    if not D:
        return
    how = tile(A // kv_heads, itemsize=q_DAd.itemsize, target=chip_of(cache_BSE).target)
    splits = max(1, triton.cdiv(plan.max_context, SPLIT_TOKENS))
    if window:
        splits = min(splits, triton.cdiv(window, SPLIT_TOKENS) + 1)
    out_DAd = out_DX.view(D, A, d)
    parts, logs = empty_splits(D, A, splits if splits > 1 else 0, d, out_DX.device)
    _attend[(kv_heads, D, splits)](
        q_DAd,
        cache_BSE,
        plan.blocks_DB,
        plan.context_D,
        plan.context_D if sinks_A is None else sinks_A,
        out_DAd,
        parts,
        logs,
        scale * LOG2_E.value,
        plan.blocks_DB.stride(0),
        q_DAd.stride(0),
        q_DAd.stride(1),
        splits,
        **_constants(S, kv_heads, A // kv_heads, d, window, sinks_A is not None, how),
        num_warps=how.warps,
        num_stages=how.stages,
        enable_fp_fusion=True,
    )
    if splits > 1:
        join_splits(parts, logs, plan.context_D, split_tokens=SPLIT_TOKENS, window=window, out_DAV=out_DAd)


def _constants(
    S: int, kv_heads: int, group: int, head_dim: int, window: int, sinks: bool, how: Tile
) -> dict[str, int]:
    return {
        "S": S,
        "KV_HEADS": kv_heads,
        "G": group,
        "DIM": head_dim,
        "SPLIT": SPLIT_TOKENS,
        "WINDOW": window,
        "SINKS": sinks,
        "BH": how.heads,
        "BN": how.tokens,
    }


def aot_cases(target: Target) -> Iterator[AotCase]:
    """The GQA models in blocks of 16 and 64; one case with a window and sinks."""
    pointers = {
        "q_ptr": "*bf16",
        "cache_ptr": "*bf16",
        "blocks_ptr": "*i32",
        "context_ptr": "*i32",
        "out_ptr": "*bf16",
        "parts_ptr": "*fp32",
        "logs_ptr": "*fp32",
    }
    numbers = ("table_width", "q_row_stride", "q_head_stride", "splits")
    cases = [(m, S, 0, False) for m in shapes.MODELS if m.kv_heads for S in (16, 64)]
    for model, S, window, sinks in [*cases, (shapes.QWEN3_235B, 64, 128, True)]:
        group = model.heads // model.kv_heads
        how = tile(group, itemsize=2, target=target)
        variant = f" window {window}, sinks" if window else ""
        yield AotCase(
            operation="gqa_decode",
            label=f"{model.name} page {S} {how.heads}x{how.tokens}{variant}",
            kernel=_attend,
            signature={
                **pointers,
                "sinks_ptr": "*fp32" if sinks else "*i32",
                "scale_log2": "fp32",
                **dict.fromkeys(numbers, "i32"),
            },
            constants=_constants(S, model.kv_heads, group, model.head_dim, window, sinks, how),
            aligned=frozenset({*pointers, "sinks_ptr", "q_row_stride", "q_head_stride"}),
            num_warps=how.warps,
            num_stages=how.stages,
            matrix="bf16" if target is GFX_942 else "small",
            streams=True,
            representative=target.name == "sm_90" and model is shapes.GLM_4_5 and S == 64,
        )
