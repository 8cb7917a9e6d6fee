"""kv_write in Triton: one program stores one row, or quantises it into a packed latent cache.

The scale of a group is found on the bits of the number, so that it equals the reference's exactly.
T rows, E values per entry, R latent rank.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.paged import latent

BLOCK = 1024  # values per program of a plain row


@triton.jit
def _write_rows(cache_ptr, slots_ptr, entries_ptr, E, entries_stride, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + t)
    value = tl.load(entries_ptr + t * entries_stride + at, mask=at < E)
    tl.store(cache_ptr + slot * E + at, value.to(cache_ptr.dtype.element_ty), mask=at < E)


@triton.jit
def _write_packed(
    latent_ptr,  # e4m3 view of the cache
    scales_ptr,  # fp32 view
    rope_ptr,  # bf16 view
    slots_ptr,
    entries_ptr,
    entries_stride,
    R: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two of at least R / GROUP
    INVERSE_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    USED: tl.constexpr = (R + GROUP - 1) // GROUP
    BYTES: tl.constexpr = R + 4 * USED + 2 * ROPE
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    g = tl.arange(0, GROUPS)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = entries_ptr + t * entries_stride
    value = tl.load(row + at, mask=at < R, other=0.0).to(tl.float32)
    source = tl.maximum(tl.max(tl.abs(value), 1) * INVERSE_MAX, SMALLEST)
    # Adding all mantissa bits carries into the exponent unless the number is a power of two already.
    exponent = (source.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    quantised = (value * inverse[:, None]).to(latent_ptr.dtype.element_ty)
    tl.store(latent_ptr + slot * BYTES + at, quantised, mask=at < R)
    tl.store(scales_ptr + slot * (BYTES // 4) + R // 4 + g, scale, mask=g < USED)
    d = tl.arange(0, ROPE)
    rope = tl.load(row + R + d).to(tl.bfloat16)
    tl.store(rope_ptr + slot * (BYTES // 2) + R // 2 + 2 * USED + d, rope)


def kv_write(cache_BSE: Tensor, kv_slots_T: Tensor, entries_TE: Tensor) -> None:
    """As the reference, bit for bit."""
    T, E = entries_TE.shape
    if not T:
        return
    if not cache_BSE.is_contiguous():
        raise KernelError("the cache must be contiguous")
    if entries_TE.stride(1) != 1:
        entries_TE = entries_TE.contiguous()
    kv_slots_T = kv_slots_T.contiguous()
    if cache_BSE.dtype != torch.uint8:
        grid = (T, triton.cdiv(E, BLOCK))
        _write_rows[grid](cache_BSE, kv_slots_T, entries_TE, E, entries_TE.stride(0), BLOCK=BLOCK)
        return
    rank, kind = latent.rank_of(E, cache_BSE.shape[2]), latent.e4m3(cache_BSE.device)
    _write_packed[(T,)](
        cache_BSE.view(kind),
        cache_BSE.view(torch.float32),
        cache_BSE.view(torch.bfloat16),
        kv_slots_T,
        entries_TE,
        entries_TE.stride(0),
        **_constants(rank, E - rank, torch.finfo(kind).max),
    )


def _constants(rank: int, rope: int, largest: float) -> dict[str, float]:
    return {
        "R": rank,
        "ROPE": rope,
        "GROUP": latent.GROUP,
        "GROUPS": triton.next_power_of_2(triton.cdiv(rank, latent.GROUP)),
        "INVERSE_MAX": 1.0 / largest,
        "SMALLEST": latent.SMALLEST_SCALE_SOURCE,
    }


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Plain rows (sizes are run-time numbers), and packed rows of MLA models."""
    common = {"slots_ptr": "*i64", "entries_ptr": "*bf16"}
    yield AotCase(
        operation="kv_write",
        label="bf16",
        kernel=_write_rows,
        signature={"cache_ptr": "*bf16", **common, "E": "i32", "entries_stride": "i32"},
        constants={"BLOCK": BLOCK},
        aligned=frozenset({"cache_ptr", "slots_ptr", "entries_ptr", "E", "entries_stride"}),
    )
    model = shapes.DEEPSEEK_V3  # Kimi-K2 has the same latent
    largest = torch.finfo(torch.float8_e4m3fnuz if target.fp8 == "fp8e4b8" else torch.float8_e4m3fn).max
    yield AotCase(
        operation="kv_write",
        label=f"packed {model.latent_rank}+{model.rope_dim}",
        kernel=_write_packed,
        signature={
            "latent_ptr": f"*{target.fp8}",
            "scales_ptr": "*fp32",
            "rope_ptr": "*bf16",
            **common,
            "entries_stride": "i32",
        },
        constants=_constants(model.latent_rank, model.rope_dim, largest),
        aligned=frozenset(
            {"latent_ptr", "scales_ptr", "rope_ptr", "slots_ptr", "entries_ptr", "entries_stride"}
        ),
        representative=target.fp8 == "fp8e4b8",
    )
