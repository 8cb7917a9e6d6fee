"""mla_prefill in Triton: expand the latents of the step's segments per head, then attend as gqa_prefill does.

Expanding reads the latents where they lie in the cache, of either kind, block after block; its tiles are the
same for any number of tokens, so that a key does not depend on what was expanded with it. Long contexts are
expanded and attended a few heads at a time, which bounds the memory and changes nothing else. M tokens of
all blocks of the segments, R latent rank, X = nope + V; otherwise as the reference.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import GFX_942, AotCase, Target
from moe_runtime.kernels.chip import chip_of
from moe_runtime.kernels.gqa_prefill.triton import NUMBERS, attend_tiles, tile, tile_constants
from moe_runtime.kernels.mla_decode.reference import split_kv_b
from moe_runtime.kernels.paged import latent
from moe_runtime.kernels.paged.triton import LOG2_E, QUERY_TILE, PrefillPlan, check_layout

EXPANDED_BYTES = 2**29  # keys and values of the heads attended at a time


@triton.jit
def _expand(
    latent_ptr,  # the cache, or an e4m3 view of it
    scales_ptr,  # fp32 view, if packed
    blocks_ptr,
    w_ptr,  # [N, R], contiguous
    out_ptr,  # [M, N]
    M,
    N,
    S: tl.constexpr,
    R: tl.constexpr,
    ROW: tl.constexpr,  # length of a cache row in the type of latent_ptr
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,  # latent values per scale
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out[m] = w @ latent[m], in the type of w; fp32 sums in the order of R."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    block = tl.load(blocks_ptr + m // S, mask=m < M, other=0)
    at = block.to(tl.int64) * S + m % S
    x_at = latent_ptr + at[:, None] * ROW + k[None, :]
    w_at = w_ptr + n[None, :] * R + k[:, None]
    sums = tl.zeros([BM, BN], tl.float32)
    for first in range(0, R, BK):
        inner = k < R - first
        w = tl.load(w_at + first, mask=(n < N)[None, :] & inner[:, None], other=0.0)
        x = tl.load(x_at + first, mask=(m < M)[:, None] & inner[None, :], other=0.0).to(w.dtype)
        if PACKED:
            scale = tl.load(scales_ptr + at * (ROW // 4) + R // 4 + first // GROUP, mask=m < M, other=0.0)
            x = x * scale.to(w.dtype)[:, None]
        sums = tl.dot(x, w, sums, input_precision="ieee")
    out_at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def mla_prefill(
    q_TAQ: Tensor,
    cache_BSE: Tensor,
    plan: PrefillPlan,
    kv_b_proj: Tensor,
    scale: float,
    *,
    out_TX: Tensor,
) -> None:
    """As the reference; a row's result depends on its own sequence alone."""
    check_layout(q_TAQ, cache_BSE, out_TX)
    w_uk, w_uv = split_kv_b(kv_b_proj, q_TAQ, cache_BSE)
    (T, A, _), nope, v_dim = q_TAQ.shape, w_uk.shape[1], w_uv.shape[1]
    S, X = cache_BSE.shape[1], nope + v_dim
    tokens = len(plan.blocks_N) * S
    if not tokens:
        return
    out_TAV = out_TX.view(T, A, v_dim)
    pass_heads = heads_at_a_time(A, tokens * X * q_TAQ.itemsize)
    for first in range(0, A, pass_heads):
        heads = slice(first, min(first + pass_heads, A))
        expanded_MAX = q_TAQ.new_empty(tokens, heads.stop - first, X)
        _launch_expand(cache_BSE, plan.blocks_N, kv_b_proj[first * X : heads.stop * X], expanded_MAX)
        _launch_attend(q_TAQ[:, heads], expanded_MAX, cache_BSE, plan, nope, scale, out_TAV[:, heads])


def heads_at_a_time(heads: int, bytes_per_head: int) -> int:
    """As many as EXPANDED_BYTES holds, in passes of nearly equal size."""
    most = max(1, min(heads, EXPANDED_BYTES // bytes_per_head))
    return -(-heads // -(-heads // most))


def _launch_expand(cache_BSE: Tensor, blocks_N: Tensor, w_NR: Tensor, out_MAX: Tensor) -> None:
    packed, M, (N, R) = cache_BSE.dtype == torch.uint8, out_MAX.shape[0], w_NR.shape
    how = expand_tile(w_NR.itemsize, packed=packed, target=chip_of(cache_BSE).target)
    _expand[(triton.cdiv(M, how["BM"]), triton.cdiv(N, how["BN"]))](
        cache_BSE.view(latent.e4m3(cache_BSE.device)) if packed else cache_BSE,
        cache_BSE.view(torch.float32) if packed else cache_BSE,
        blocks_N,
        w_NR,
        out_MAX,
        M,
        N,
        **_expand_constants(cache_BSE.shape[1], R, cache_BSE.shape[2], packed),
        **how,
        enable_fp_fusion=True,
    )


def _launch_attend(
    q_TAQ: Tensor,
    expanded_MAX: Tensor,
    cache_BSE: Tensor,
    plan: PrefillPlan,
    nope: int,
    scale: float,
    out_TAV: Tensor,
) -> None:
    (_, A, Q), X, S = q_TAQ.shape, expanded_MAX.shape[2], cache_BSE.shape[1]
    packed = cache_BSE.dtype == torch.uint8
    how = tile(itemsize=q_TAQ.itemsize, target=chip_of(cache_BSE).target)
    attend_tiles[(A, len(plan.tiles_WF) * (QUERY_TILE // how.rows))](
        q_TAQ,
        expanded_MAX,
        expanded_MAX.view(-1)[nope:],
        cache_BSE.view(torch.bfloat16) if packed else cache_BSE,
        out_TAV,
        plan.tiles_WF,
        plan.blocks_N,
        plan.tiles_WF,
        scale * LOG2_E.value,
        q_TAQ.stride(0),
        q_TAQ.stride(1),
        A * X,
        X,
        X,
        out_TAV.stride(0),
        out_TAV.stride(1),
        **_attend_constants(S, nope, Q - nope, X - nope, cache_BSE.shape[2], packed),
        **tile_constants(how),
        num_warps=how.warps,
        num_stages=how.stages,
        enable_fp_fusion=True,
    )


def expand_tile(itemsize: int, *, packed: bool, target: Target) -> dict[str, int]:
    """The tile and the launch options of `_expand`."""
    if itemsize > 2:
        return {"BM": 32, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 1}
    if target is GFX_942:
        return {"BM": 128, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 2}
    stages = 3 if packed else 4
    return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": stages}


def _expand_constants(S: int, rank: int, row: int, packed: bool) -> dict[str, int]:
    return {"S": S, "R": rank, "ROW": row, "PACKED": packed, "GROUP": latent.GROUP}


def _attend_constants(S: int, nope: int, rope: int, v_dim: int, width: int, packed: bool) -> dict[str, int]:
    return {
        "ROPE_ROW": width // 2 if packed else width,
        "ROPE_AT": width // 2 - rope if packed else width - rope,
        "S": S,
        "PAGED": False,
        "G": 1,
        "QK": nope,
        "QKP": triton.next_power_of_2(nope),
        "ROPE": rope,
        "V": v_dim,
        "VP": triton.next_power_of_2(v_dim),
        "WINDOW": 0,
        "SINKS": False,
    }


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Both steps over both kinds of cache in blocks of 16 and 64.

    The heads are run-time numbers: DeepSeek-V3 and Kimi-K2 share their cases.
    """
    model = shapes.DEEPSEEK_V3
    for packed in (False, True):
        for S in (16, 64):
            yield _expand_case(model, target, S, packed=packed)
            yield _attend_case(model, target, S, packed=packed)


def _width(model: shapes.ModelShape, packed: bool) -> int:
    rank, rope = model.latent_rank, model.rope_dim
    return latent.row_bytes(rank, rope) if packed else rank + rope


def _expand_case(model: shapes.ModelShape, target: Target, S: int, *, packed: bool) -> AotCase:
    how = expand_tile(2, packed=packed, target=target)
    warps, stages = how.pop("num_warps"), how.pop("num_stages")
    pointers = {
        "latent_ptr": f"*{target.fp8}" if packed else "*bf16",
        "scales_ptr": "*fp32" if packed else "*bf16",
        "blocks_ptr": "*i32",
        "w_ptr": "*bf16",
        "out_ptr": "*bf16",
    }
    return AotCase(
        operation="mla_prefill",
        label=f"expand {'packed' if packed else 'bf16'} page {S} {how['BM']}x{how['BN']}x{how['BK']}",
        kernel=_expand,
        signature={**pointers, "M": "i32", "N": "i32"},
        constants={**_expand_constants(S, model.latent_rank, _width(model, packed), packed), **how},
        aligned=frozenset({*pointers, "M", "N"}),
        num_warps=warps,
        num_stages=stages,
        matrix="bf16",
        streams=True,
    )


def _attend_case(model: shapes.ModelShape, target: Target, S: int, *, packed: bool) -> AotCase:
    how = tile(itemsize=2, target=target)
    floats = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "rope_ptr", "out_ptr"), "*bf16")
    integers = dict.fromkeys(("sinks_ptr", "blocks_ptr", "tiles_ptr"), "*i32")
    sizes = (model.nope_dim, model.rope_dim, model.value_dim)
    return AotCase(
        operation="mla_prefill",
        label=f"{model.name} {'packed' if packed else 'bf16'} page {S} {how.rows}x{how.tokens}",
        kernel=attend_tiles,
        signature={**floats, **integers, "scale_log2": "fp32", **dict.fromkeys(NUMBERS, "i32")},
        constants={
            **_attend_constants(S, *sizes, _width(model, packed), packed),
            **tile_constants(how),
        },
        aligned=frozenset({*floats, *integers, *NUMBERS}),
        num_warps=how.warps,
        num_stages=how.stages,
        matrix="bf16",
        streams=True,
        representative=packed and S == 64 and target is GFX_942,
    )
