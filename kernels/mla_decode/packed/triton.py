"""The attention of mla_decode over a packed latent cache (`paged.latent`): a kernel that mla_decode launches.

Owns how e4m3 latents become operands of the queries' type: in four chunks, each multiplied by its group's
scale, a power of two, so that nothing is rounded. The compiler makes no asynchronous copies of values that
are converted before they are multiplied; the next tile is therefore loaded into registers while this one is
computed. Names as in mla_decode.
"""

import triton
import triton.language as tl

from moe_runtime.kernels.paged.triton import split_range


@triton.jit
def _load_tile(
    latent_ptr,
    scales_ptr,
    rope_ptr,
    block,
    first,
    end,
    S: tl.constexpr,
    R: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    BN: tl.constexpr,
):
    """Of tokens [first, min(first + BN, end)): latents in four chunks, the chunks' scales, the rope part."""
    BYTES: tl.constexpr = R + 4 * GROUPS + 2 * ROPE
    C: tl.constexpr = R // 4
    n = tl.arange(0, BN)
    ok = n < end - first
    inside = ok[:, None]
    at = block.to(tl.int64) * S + (first % S + n if S % BN == 0 else (first + n) % S)
    chunk = latent_ptr + at[:, None] * BYTES + tl.arange(0, C)[None, :]
    scale = scales_ptr + at * (BYTES // 4) + R // 4
    rope = rope_ptr + at[:, None] * (BYTES // 2) + (R // 2 + 2 * GROUPS + tl.arange(0, ROPE))[None, :]
    return (
        tl.load(chunk, mask=inside, other=0.0),
        tl.load(chunk + C, mask=inside, other=0.0),
        tl.load(chunk + 2 * C, mask=inside, other=0.0),
        tl.load(chunk + 3 * C, mask=inside, other=0.0),
        tl.load(scale, mask=ok, other=0.0),
        tl.load(scale + GROUPS // 4, mask=ok, other=0.0),
        tl.load(scale + GROUPS // 2, mask=ok, other=0.0),
        tl.load(scale + 3 * GROUPS // 4, mask=ok, other=0.0),
        tl.load(rope, mask=inside, other=0.0),
    )


@triton.jit(do_not_specialize=("table_width", "splits"))
def attend_packed(
    q_latent_ptr,  # [D, A, R], contiguous
    q_rope_ptr,
    latent_ptr,  # e4m3, fp32 and bf16 views of the cache
    scales_ptr,
    rope_ptr,
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
    GROUPS: tl.constexpr,  # scales per token
    SPLIT: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    C: tl.constexpr = R // 4
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(context_ptr + row)
    _, used, _ = split_range(context, SPLIT, 0)
    if split >= used:
        return
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, context)

    h = tl.program_id(0) * BH + tl.arange(0, BH)
    n = tl.arange(0, BN)
    real = (h < A)[:, None]
    in_row = h[:, None] * R + tl.arange(0, C)[None, :]
    q_at = q_latent_ptr + row * A * R + in_row
    q0 = tl.load(q_at, mask=real, other=0.0)
    q1 = tl.load(q_at + C, mask=real, other=0.0)
    q2 = tl.load(q_at + 2 * C, mask=real, other=0.0)
    q3 = tl.load(q_at + 3 * C, mask=real, other=0.0)
    q_rope_at = q_rope_ptr + row * q_row_stride + h[:, None] * q_head_stride + tl.arange(0, ROPE)[None, :]
    q_rope = tl.load(q_rope_at, mask=real, other=0.0)

    largest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    o0 = tl.zeros([BH, C], tl.float32)
    o1 = tl.zeros([BH, C], tl.float32)
    o2 = tl.zeros([BH, C], tl.float32)
    o3 = tl.zeros([BH, C], tl.float32)
    table = blocks_ptr + row * table_width
    last = tl.maximum(end - 1, 0)
    ahead = tl.arange(0, 1 if S % BN == 0 else BN)
    block = tl.load(table + tl.minimum(begin + ahead, last) // S)
    r0, r1, r2, r3, s0, s1, s2, s3, r_rope = _load_tile(
        latent_ptr, scales_ptr, rope_ptr, block, begin, end, S, R, ROPE, GROUPS, BN
    )
    block = tl.load(table + tl.minimum(begin + BN + ahead, last) // S)
    for first in range(begin, end, BN):
        k0 = r0.to(q0.dtype) * s0.to(q0.dtype)[:, None]
        k1 = r1.to(q0.dtype) * s1.to(q0.dtype)[:, None]
        k2 = r2.to(q0.dtype) * s2.to(q0.dtype)[:, None]
        k3 = r3.to(q0.dtype) * s3.to(q0.dtype)[:, None]
        k_rope = r_rope.to(q0.dtype)
        r0, r1, r2, r3, s0, s1, s2, s3, r_rope = _load_tile(
            latent_ptr, scales_ptr, rope_ptr, block, first + BN, end, S, R, ROPE, GROUPS, BN
        )
        block = tl.load(table + tl.minimum(first + 2 * BN + ahead, last) // S)
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        scores = tl.dot(q0, tl.trans(k0), scores, input_precision="ieee")
        scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
        scores = tl.dot(q3, tl.trans(k3), scores, input_precision="ieee")
        scores = tl.where((n < end - first)[None, :], scores * scale_log2, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - larger)[:, None]
        probs = tl.exp2(scores - larger[:, None])
        total = total * tl.exp2(largest - larger) + tl.sum(probs, 1)
        probs = probs.to(q0.dtype)
        o0 = tl.dot(probs, k0, o0 * shrink, input_precision="ieee")
        o1 = tl.dot(probs, k1, o1 * shrink, input_precision="ieee")
        o2 = tl.dot(probs, k2, o2 * shrink, input_precision="ieee")
        o3 = tl.dot(probs, k3, o3 * shrink, input_precision="ieee")
        largest = larger
    norm = tl.where(total > 0, total, 1.0)[:, None]
    if used == 1:
        out_at = out_ptr + row * A * R + in_row
        tl.store(out_at, (o0 / norm).to(out_ptr.dtype.element_ty), mask=real)
        tl.store(out_at + C, (o1 / norm).to(out_ptr.dtype.element_ty), mask=real)
        tl.store(out_at + 2 * C, (o2 / norm).to(out_ptr.dtype.element_ty), mask=real)
        tl.store(out_at + 3 * C, (o3 / norm).to(out_ptr.dtype.element_ty), mask=real)
    else:
        part = h * splits + split
        part_at = parts_ptr + row * A * splits * R + part[:, None] * R + tl.arange(0, C)[None, :]
        tl.store(part_at, o0 / norm, mask=real)
        tl.store(part_at + C, o1 / norm, mask=real)
        tl.store(part_at + 2 * C, o2 / norm, mask=real)
        tl.store(part_at + 3 * C, o3 / norm, mask=real)
        tl.store(logs_ptr + row * A * splits + part, largest + tl.log2(total), mask=h < A)
