"""gqa_prefill in Triton, and the kernel that it shares with mla_prefill.

A program takes one query head of one tile of the plan and walks over the keys it may see, in tiles counted
from the sequence's first token: a row's result depends neither on how its prompt was cut into chunks nor on
other sequences. Programs of heads that share keys are neighbours, so that keys come from L2. Softmax and
sums are fp32. T rows, A query heads, d head dimension, S tokens per block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import GFX_942, AotCase, Target
from moe_runtime.kernels.chip import chip_of
from moe_runtime.kernels.paged.triton import LOG2_E, QUERY_TILE, TILE_FIELDS, PrefillPlan, check_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Query rows x tokens that a program multiplies at a time; rows divide QUERY_TILE."""

    rows: int
    tokens: int
    warps: int
    stages: int


def tile(*, itemsize: int, target: Target) -> Tile:
    """For heads of up to 256 values; every choice compiles without spilling for the models' heads."""
    if itemsize > 2:
        return Tile(rows=64, tokens=32, warps=8, stages=1)
    if target is GFX_942:
        return Tile(rows=128, tokens=32, warps=8, stages=1)
    return Tile(rows=128, tokens=64, warps=8, stages=3)


@triton.jit
def attend_tiles(
    q_ptr,  # [T, A, QK + ROPE], any strides but the last
    k_ptr,
    v_ptr,
    rope_ptr,  # the cache, if ROPE
    out_ptr,  # [T, A, V], any strides but the last
    sinks_ptr,  # fp32 [A]
    blocks_ptr,
    tiles_ptr,
    scale_log2,
    q_row_stride,
    q_head_stride,
    kv_row_stride,  # of both keys and values
    k_head_stride,
    v_head_stride,
    out_row_stride,
    out_head_stride,
    ROPE_ROW: tl.constexpr,
    ROPE_AT: tl.constexpr,
    S: tl.constexpr,
    PAGED: tl.constexpr,  # keys and values lie in the cache, else row i belongs to token i of the blocks
    G: tl.constexpr,  # query heads per key/value head
    QK: tl.constexpr,
    QKP: tl.constexpr,  # a power of two of at least QK
    ROPE: tl.constexpr,  # values of a key's part that all heads share; 0: none
    V: tl.constexpr,
    VP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    PARTS: tl.constexpr = QUERY_TILE // BM
    head = tl.program_id(0)
    fields = tiles_ptr + tl.program_id(1) // PARTS * FIELDS
    skipped = tl.program_id(1) % PARTS * BM
    rows = tl.load(fields + 1) - skipped
    if rows <= 0:
        return
    start = (tl.load(fields) + skipped).to(tl.int64)
    position = tl.load(fields + 2) + skipped
    first_block = tl.load(fields + 3)
    end = position + tl.minimum(rows, BM)

    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    x = tl.arange(0, QKP)
    v_at = tl.arange(0, VP)
    real = (m < rows)[:, None]
    q_at = q_ptr + start * q_row_stride + head * q_head_stride + m[:, None] * q_row_stride
    q = tl.load(q_at + x[None, :], mask=real & (x < QK)[None, :], other=0.0)
    if ROPE:
        q_rope = tl.load(q_at + (QK + tl.arange(0, ROPE))[None, :], mask=real, other=0.0)
    largest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, VP], tl.float32)
    begin = tl.maximum(position - WINDOW + 1, 0) // BN * BN if WINDOW else 0
    ahead = tl.arange(0, 1 if S % BN == 0 else BN)
    table = blocks_ptr + first_block
    if PAGED or ROPE:
        block = tl.load(table + tl.minimum(begin + ahead, end - 1) // S)
    for first in range(begin, end, BN):
        token = first + n
        inside = (token < end)[:, None]
        if PAGED or ROPE:
            at = block.to(tl.int64) * S + (first % S + n if S % BN == 0 else token % S)
            block = tl.load(table + tl.minimum(first + BN + ahead, end - 1) // S)
        row = at if PAGED else first_block.to(tl.int64) * S + token
        k_at = k_ptr + row[:, None] * kv_row_stride + head // G * k_head_stride + x[None, :]
        k = tl.load(k_at, mask=inside & (x < QK)[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if ROPE:
            rope_at = rope_ptr + at[:, None] * ROPE_ROW + (ROPE_AT + tl.arange(0, ROPE))[None, :]
            k_rope = tl.load(rope_at, mask=inside, other=0.0).to(q.dtype)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        behind = (position + m)[:, None] - token[None, :]
        seen = (behind >= 0) & (behind < WINDOW) if WINDOW else behind >= 0
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        # With a window a row may see nothing of the first tiles.
        base = tl.where(larger == float("-inf"), 0.0, larger) if WINDOW else larger
        shrink = tl.exp2(largest - base)
        probs = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(probs, 1)
        v = tl.load(
            v_ptr + row[:, None] * kv_row_stride + head // G * v_head_stride + v_at[None, :],
            mask=inside & (v_at < V)[None, :],
            other=0.0,
        ).to(q.dtype)
        sums = tl.dot(probs.to(q.dtype), v, sums * shrink[:, None], input_precision="ieee")
        largest = larger
    if SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2_E
        larger = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.exp2(sink - larger)
        sums *= shrink[:, None]
    out_at = out_ptr + start * out_row_stride + head * out_head_stride + m[:, None] * out_row_stride
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at + v_at[None, :], out, mask=real & (v_at < V)[None, :])


def gqa_prefill(
    q_TAd: Tensor,
    cache_BSE: Tensor,
    plan: PrefillPlan,
    scale: float,
    *,
    out_TX: Tensor,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> None:
    """As the reference; a row's result depends on its own sequence alone. Sinks are fp32."""
    check_layout(q_TAd, cache_BSE, out_TX, sinks_A)
    (T, A, d), (_, S, E) = q_TAd.shape, cache_BSE.shape
    kv_heads = E // (2 * d)
    out_TAd = out_TX.view(T, A, d)
    how = tile(itemsize=q_TAd.itemsize, target=chip_of(cache_BSE).target)
    if not len(plan.tiles_WF):
        return
    values = cache_BSE.view(-1)[kv_heads * d :]
    attend_tiles[(A, len(plan.tiles_WF) * (QUERY_TILE // how.rows))](
        q_TAd,
        cache_BSE,
        values,
        cache_BSE,
        out_TAd,
        plan.tiles_WF if sinks_A is None else sinks_A,
        plan.blocks_N,
        plan.tiles_WF,
        scale * LOG2_E.value,
        q_TAd.stride(0),
        q_TAd.stride(1),
        E,
        d,
        d,
        out_TAd.stride(0),
        out_TAd.stride(1),
        **_constants(S, A // kv_heads, d, window, sinks_A is not None),
        **tile_constants(how),
        num_warps=how.warps,
        num_stages=how.stages,
        enable_fp_fusion=True,
    )


def tile_constants(how: Tile) -> dict[str, int]:
    """The constants of `attend_tiles` that a tile decides."""
    return {"QUERY_TILE": QUERY_TILE, "FIELDS": TILE_FIELDS, "BM": how.rows, "BN": how.tokens}


def _constants(S: int, group: int, head_dim: int, window: int, sinks: bool) -> dict[str, int]:
    padded = triton.next_power_of_2(head_dim)
    return {
        "ROPE_ROW": 0,
        "ROPE_AT": 0,
        "S": S,
        "PAGED": True,
        "G": group,
        "QK": head_dim,
        "QKP": padded,
        "ROPE": 0,
        "V": head_dim,
        "VP": padded,
        "WINDOW": window,
        "SINKS": sinks,
    }


NUMBERS = (
    "q_row_stride",
    "q_head_stride",
    "kv_row_stride",
    "k_head_stride",
    "v_head_stride",
    "out_row_stride",
    "out_head_stride",
)


def aot_cases(target: Target) -> Iterator[AotCase]:
    """The GQA models in blocks of 16 and 64; one case with a window and sinks."""
    how = tile(itemsize=2, target=target)
    floats = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "rope_ptr", "out_ptr"), "*bf16")
    cases = [(m, S, 0, False) for m in shapes.MODELS if m.kv_heads for S in (16, 64)]
    for model, S, window, sinks in [*cases, (shapes.QWEN3_235B, 64, 128, True)]:
        group = model.heads // model.kv_heads
        variant = f" window {window}, sinks" if window else ""
        yield AotCase(
            operation="gqa_prefill",
            label=f"{model.name} page {S} {how.rows}x{how.tokens}{variant}",
            kernel=attend_tiles,
            signature={
                **floats,
                "sinks_ptr": "*fp32" if sinks else "*i32",
                "blocks_ptr": "*i32",
                "tiles_ptr": "*i32",
                "scale_log2": "fp32",
                **dict.fromkeys(NUMBERS, "i32"),
            },
            constants={
                **_constants(S, group, model.head_dim, window, sinks),
                **tile_constants(how),
            },
            aligned=frozenset({*floats, "sinks_ptr", "blocks_ptr", "tiles_ptr", *NUMBERS}),
            num_warps=how.warps,
            num_stages=how.stages,
            matrix="bf16",
            streams=True,
            representative=target.name == "sm_100" and model is shapes.GLM_4_5 and S == 64,
        )
