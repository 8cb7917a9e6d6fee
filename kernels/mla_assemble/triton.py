"""mla_assemble on a GPU in one launch: some programs of a row rotate query heads, one makes its cache entry.

T rows, A heads, Q values per query head, R latent rank, D rotated values, E = R + D.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.rms_norm.triton import normalized
from moe_runtime.kernels.rope.triton import heads_per_program, rotated, store_rotated


@triton.jit
def _mla_assemble(
    q_ptr,
    entries_ptr,
    weight_ptr,
    cos_sin_ptr,
    cache_ptr,
    kv_slots_ptr,
    A,
    q_stride,
    head_stride,
    entries_stride,
    table_stride,
    cache_stride,
    nope,
    eps,
    R: tl.constexpr,
    RP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    turn_ptr = cos_sin_ptr + token * table_stride
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        at = token * q_stride + head.to(tl.int64) * head_stride + nope
        first, second = rotated(q_ptr, at, head < A, turn_ptr, D, DP, INTERLEAVED)
        store_rotated(first, second, q_ptr, at, head < A, D, DP, INTERLEAVED)
    else:
        dtype: tl.constexpr = entries_ptr.dtype.element_ty
        source_ptr = entries_ptr + token * entries_stride
        target_ptr = cache_ptr + tl.load(kv_slots_ptr + token) * cache_stride
        column = tl.arange(0, RP)
        latent = tl.load(source_ptr + column[None, :], mask=(column < R)[None, :], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < R, other=0.0).to(tl.float32)
        y = normalized(latent, weight, R, eps, dtype).to(dtype).to(cache_ptr.dtype.element_ty)
        tl.store(target_ptr + column[None, :], y, mask=(column < R)[None, :])
        one = tl.arange(0, 1)
        at_key = one.to(tl.int64) + R
        key, other = rotated(source_ptr, at_key, one == 0, turn_ptr, D, DP, INTERLEAVED)
        key, other = key.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
        store_rotated(key, other, target_ptr, at_key, one == 0, D, DP, INTERLEAVED)


def mla_assemble(
    q_TAQ: Tensor,
    entries_TE: Tensor,
    latent_weight_R: Tensor,
    cos_sin_TD: Tensor,
    cache_BSE: Tensor,
    kv_slots_T: Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> None:
    """As the reference, up to the rounding of the mean; `entries` is not changed. LOCAL."""
    (T, A, Q), (R, D) = q_TAQ.shape, (len(latent_weight_R), cos_sin_TD.shape[1])
    assert q_TAQ.stride(2) == entries_TE.stride(1) == cache_BSE.stride(2) == 1
    assert cache_BSE.stride(0) == cache_BSE.shape[1] * cache_BSE.stride(1)
    heads = heads_per_program(A)
    _mla_assemble[(T, 1 + triton.cdiv(A, heads))](
        q_TAQ,
        entries_TE,
        latent_weight_R,
        cos_sin_TD,
        cache_BSE,
        kv_slots_T,
        A,
        q_TAQ.stride(0),
        q_TAQ.stride(1),
        entries_TE.stride(0),
        cos_sin_TD.stride(0),
        cache_BSE.stride(1),
        Q - D,
        eps,
        R=R,
        RP=triton.next_power_of_2(R),
        D=D,
        DP=triton.next_power_of_2(D),
        INTERLEAVED=interleaved,
        HEADS=heads,
        num_warps=1,
        enable_fp_fusion=False,
    )


def aot_cases(target: Target) -> Iterator[AotCase]:
    """The models with MLA, which share one latent size."""
    sizes = {(m.latent_rank, m.rope_dim, heads_per_program(m.heads)) for m in shapes.MODELS if m.latent_rank}
    strides = ("q_stride", "head_stride", "entries_stride", "table_stride", "cache_stride")
    for rank, width, heads in sorted(sizes):
        yield AotCase(
            operation="mla_assemble",
            label=f"latent {rank} + {width}, {heads} heads per program",
            kernel=_mla_assemble,
            signature={
                "q_ptr": "*bf16",
                "entries_ptr": "*bf16",
                "weight_ptr": "*bf16",
                "cos_sin_ptr": "*fp32",
                "cache_ptr": "*bf16",
                "kv_slots_ptr": "*i64",
                **dict.fromkeys(("A", *strides, "nope"), "i32"),
                "eps": "fp32",
            },
            constants={
                "R": rank,
                "RP": rank,
                "D": width,
                "DP": width,
                "INTERLEAVED": True,
                "HEADS": heads,
            },
            aligned=frozenset(
                {"q_ptr", "entries_ptr", "weight_ptr", "cos_sin_ptr", "cache_ptr", "nope", *strides}
            ),
            num_warps=1,
            fp_fusion=False,
            streams=True,
            representative=target.name == "sm_100",
        )
