"""mla_decode in Triton: absorb, attend to the latents in splits, join, expand.

The first and the last are products per head (`per_head`); the middle takes tiles of heads, which share every
latent they read. A row's result depends neither on the batch nor on the row's place in it. Softmax and sums
are fp32. D rows, A heads, R latent rank, S tokens per block; otherwise as the reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import GFX_942, SM_100, AotCase, Target
from moe_runtime.kernels.chip import chip_of
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.mla_decode.packed.triton import attend_packed
from moe_runtime.kernels.mla_decode.per_head.triton import multiply_per_head, per_head_case
from moe_runtime.kernels.mla_decode.reference import split_kv_b
from moe_runtime.kernels.paged import latent
from moe_runtime.kernels.paged.triton import (
    LOG2_E,
    DecodePlan,
    check_layout,
    empty_splits,
    join_splits,
    split_range,
)

SPLIT_TOKENS = 1024  # a split of 64 heads writes 128 KiB for about 1 MiB read


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Heads x tokens that a program multiplies at a time."""

    heads: int
    tokens: int
    warps: int = 8
    stages: int = 3


def tile(heads: int, block_tokens: int, *, itemsize: int, packed: bool, target: Target) -> Tile:
    """From sizes alone; every choice compiles without spilling. `itemsize` is that of the queries.

    An accumulator of 64 heads x 512 leaves sm_90 too few registers for anything but 16 tokens at a time,
    so there the tile has 32 heads and mma.sync; sm_100 keeps it in tensor memory. gfx942 has 64 KiB of
    shared memory: no second buffer.
    """
    if itemsize > 2:
        return Tile(heads=16, tokens=16, stages=1)
    if packed:
        return Tile(heads=16, tokens=16 if target is GFX_942 else 32, stages=1)
    few = 16 if heads <= 16 else 32
    if target is GFX_942:
        return Tile(heads=few, tokens=16, stages=1)
    if target is SM_100 and heads > 32:
        return Tile(heads=64, tokens=32)
    return Tile(heads=few, tokens=64 if block_tokens % 64 == 0 else 32)


@triton.jit(do_not_specialize=("table_width", "splits"))
def _attend(
    q_latent_ptr,  # [D, A, R], contiguous
    q_rope_ptr,
    cache_ptr,
    blocks_ptr,
    context_ptr,
    out_ptr,  # [D, A, R]
    parts_ptr,
    logs_ptr,
    scale_log2,
    A,
    table_width,
    q_row_stride,
    q_head_stride,
    splits,
    S: tl.constexpr,
    R: tl.constexpr,
    ROPE: tl.constexpr,
    SPLIT: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    E: tl.constexpr = R + ROPE
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(context_ptr + row)
    _, used, _ = split_range(context, SPLIT, 0)
    if split >= used:
        return
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, context)

    h = tl.program_id(0) * BH + tl.arange(0, BH)
    r = tl.arange(0, R)
    d = tl.arange(0, ROPE)
    n = tl.arange(0, BN)
    real = (h < A)[:, None]
    in_row = h[:, None] * R + r[None, :]
    q = tl.load(q_latent_ptr + row * A * R + in_row, mask=real, other=0.0)
    q_rope_at = q_rope_ptr + row * q_row_stride + h[:, None] * q_head_stride + d[None, :]
    q_rope = tl.load(q_rope_at, mask=real, other=0.0)

    largest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    sums = tl.zeros([BH, R], tl.float32)
    # The next tile's block numbers are loaded a tile ahead: a load that waits for another in the same
    # turn would cost the buffer of one stage. One number per tile if a block holds whole tiles.
    table = blocks_ptr + row * table_width
    ahead = tl.arange(0, 1 if S % BN == 0 else BN)
    block = tl.load(table + tl.maximum(tl.minimum(begin + ahead, end - 1), 0) // S)
    for first in range(begin, end, BN):
        inside = (n < end - first)[:, None]
        if S % BN == 0:
            at = (block.to(tl.int64) * S + first % S)[:, None] + n[:, None]
        else:
            at = (block.to(tl.int64) * S + (first + n) % S)[:, None]
        k = tl.load(cache_ptr + at * E + r[None, :], mask=inside, other=0.0).to(q.dtype)
        k_rope = tl.load(cache_ptr + at * E + (R + d)[None, :], mask=inside, other=0.0).to(q.dtype)
        block = tl.load(table + tl.minimum(first + BN + ahead, end - 1) // S)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        scores = tl.where((n < end - first)[None, :], scores * scale_log2, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - larger)
        probs = tl.exp2(scores - larger[:, None])
        total = total * shrink + tl.sum(probs, 1)
        sums = tl.dot(probs.to(q.dtype), k, sums * shrink[:, None], input_precision="ieee")
        largest = larger
    # A row without tokens gives zeros.
    out = sums / tl.where(total > 0, total, 1.0)[:, None]
    if used == 1:
        tl.store(out_ptr + row * A * R + in_row, out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        part = h * splits + split
        tl.store(parts_ptr + row * A * splits * R + part[:, None] * R + r[None, :], out, mask=real)
        tl.store(logs_ptr + row * A * splits + part, largest + tl.log2(total), mask=h < A)


def mla_decode(
    q_DAQ: Tensor, cache_BSE: Tensor, plan: DecodePlan, kv_b_proj: Tensor, scale: float, *, out_DX: Tensor
) -> None:
    """As the reference; a row's result depends on its own sequence alone."""
    check_layout(q_DAQ, cache_BSE, out_DX)
    w_uk, w_uv = split_kv_b(kv_b_proj, q_DAQ, cache_BSE)
    (D, A, _), (nope, rank) = q_DAQ.shape, w_uk.shape[1:]
    if not D:
        return
    q_latent_DAR = q_DAQ.new_empty(D, A, rank)
    multiply_per_head(q_DAQ[..., :nope], w_uk, q_latent_DAR)
    latent_DAR = torch.empty_like(q_latent_DAR)
    attend_latent(q_latent_DAR, q_DAQ[..., nope:], cache_BSE, plan, scale, out_DAR=latent_DAR)
    multiply_per_head(latent_DAR, w_uv.transpose(1, 2), out_DX.view(D, A, -1))


def attend_latent(
    q_latent_DAR: Tensor,
    q_rope_DAd: Tensor,
    cache_BSE: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    out_DAR: Tensor,
) -> None:
    """Weighted sums of latents for absorbed queries. Three launches at most, sizes known to the host."""
    (D, A, R), S = q_latent_DAR.shape, cache_BSE.shape[1]
    packed, rope = cache_BSE.dtype == torch.uint8, q_rope_DAd.shape[2]
    if R & (R - 1) or rope & (rope - 1) or R < 16 or rope < 16:
        raise KernelError(f"latent rank {R} and rope {rope} must be powers of two of at least 16")
    how = tile(A, S, itemsize=q_latent_DAR.itemsize, packed=packed, target=chip_of(cache_BSE).target)
    splits = max(1, triton.cdiv(plan.max_context, SPLIT_TOKENS))
    parts, logs = empty_splits(D, A, splits if splits > 1 else 0, R, out_DAR.device)
    kernel = attend_packed if packed else _attend
    views = (latent.e4m3(cache_BSE.device), torch.float32, torch.bfloat16) if packed else (cache_BSE.dtype,)
    kernel[(triton.cdiv(A, how.heads), D, splits)](
        q_latent_DAR,
        q_rope_DAd,
        *(cache_BSE.view(dtype) for dtype in views),
        plan.blocks_DB,
        plan.context_D,
        out_DAR,
        parts,
        logs,
        scale * LOG2_E.value,
        A,
        plan.blocks_DB.stride(0),
        q_rope_DAd.stride(0),
        q_rope_DAd.stride(1),
        splits,
        **_constants(S, R, rope, packed, how),
        num_warps=how.warps,
        num_stages=how.stages,
        enable_fp_fusion=True,
    )
    if splits > 1:
        join_splits(parts, logs, plan.context_D, split_tokens=SPLIT_TOKENS, window=0, out_DAV=out_DAR)


def _constants(S: int, rank: int, rope: int, packed: bool, how: Tile) -> dict[str, int]:
    groups = {"GROUPS": triton.cdiv(rank, latent.GROUP)} if packed else {}
    sizes = {"S": S, "R": rank, "ROPE": rope, "SPLIT": SPLIT_TOKENS, "BH": how.heads, "BN": how.tokens}
    return sizes | groups


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Attention over both kinds of cache in blocks of 16 and 64, and the two products around it."""
    seen = set()
    for model in (m for m in shapes.MODELS if m.latent_rank):
        for packed in (False, True):
            for S in (16, 64):
                how = tile(model.heads, S, itemsize=2, packed=packed, target=target)
                constants = _constants(S, model.latent_rank, model.rope_dim, packed, how)
                if (key := tuple(constants.items())) in seen:
                    continue
                seen.add(key)
                yield _attend_case(model, target, how, constants)
    model = shapes.DEEPSEEK_V3
    yield per_head_case(model.nope_dim, model.latent_rank, k_contiguous=False)
    yield per_head_case(model.latent_rank, model.value_dim, k_contiguous=True)


def _attend_case(model: shapes.ModelShape, target: Target, how: Tile, constants: dict[str, int]) -> AotCase:
    packed = "GROUPS" in constants
    cache = {"latent_ptr": f"*{target.fp8}", "scales_ptr": "*fp32", "rope_ptr": "*bf16"}
    pointers = {
        "q_latent_ptr": "*bf16",
        "q_rope_ptr": "*bf16",
        **(cache if packed else {"cache_ptr": "*bf16"}),
        "blocks_ptr": "*i32",
        "context_ptr": "*i32",
        "out_ptr": "*bf16",
        "parts_ptr": "*fp32",
        "logs_ptr": "*fp32",
    }
    numbers = ("A", "table_width", "q_row_stride", "q_head_stride", "splits")
    return AotCase(
        operation="mla_decode",
        label=f"{model.name} {'packed' if packed else 'bf16'} page {constants['S']} {how.heads}x{how.tokens}",
        kernel=attend_packed if packed else _attend,
        signature={**pointers, "scale_log2": "fp32", **dict.fromkeys(numbers, "i32")},
        constants=constants,
        aligned=frozenset({*pointers, "A", "q_row_stride", "q_head_stride"}),
        num_warps=how.warps,
        num_stages=how.stages,
        matrix="bf16" if how.heads >= 64 or target is GFX_942 else "small",
        streams=not (packed and target is GFX_942),  # 4 bytes per lane there, 128 in a row
        representative=packed == (target is SM_100) and constants["S"] == 64,
    )
