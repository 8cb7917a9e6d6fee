"""permute / unpermute on a GPU: every row is read once and written where a counting sort puts it; and back.

T tokens, K top-k, N rows, s slots, H hidden. Rows travel as 32-bit words, whatever their type.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.group_ranks.triton import group_ranks

BYTES = 4096  # of a row per program


@triton.jit
def _starts(counts_ptr, starts_ptr, end_ptr, S, ALIGNMENT: tl.constexpr, SP: tl.constexpr):
    slot = tl.arange(0, SP)
    counts = tl.load(counts_ptr + slot, mask=slot < S, other=0)
    sizes = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    tl.store(starts_ptr + slot, tl.cumsum(sizes, 0) - sizes, mask=slot < S)
    tl.store(end_ptr, tl.sum(sizes, 0))


@triton.jit
def _scatter(
    x_ptr,
    slots_ptr,
    ranks_ptr,
    starts_ptr,
    counts_ptr,
    rows_ptr,
    out_ptr,
    T,
    W,
    x_stride,
    capacity,
    K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs 0 .. T-1 copy a token's row to its slots; T .. T+s-1 zero the rows that end a slot."""
    item = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if item < T:
        values = tl.load(x_ptr + item.to(tl.int64) * x_stride + word, mask=word < W)
        for k in tl.static_range(K):
            slot = tl.load(slots_ptr + item.to(tl.int64) * K + k)
            row = tl.full((), -1, tl.int64)
            if slot >= 0:
                rank = tl.load(ranks_ptr + item.to(tl.int64) * K + k)
                row = (tl.load(starts_ptr + slot) + rank).to(tl.int64)
                row = tl.where(row < capacity, row, -1)
            tl.store(out_ptr + row * W + word, values, mask=(word < W) & (row >= 0))
            if tl.program_id(1) == 0:
                tl.store(rows_ptr + item.to(tl.int64) * K + k, row)
    else:
        start = tl.load(starts_ptr + item - T)
        count = tl.load(counts_ptr + item - T)
        end = start + (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        gaps_ptr = out_ptr + (start + count).to(tl.int64) * W
        for gap in tl.range(0, tl.minimum(end, capacity) - start - count):
            zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            tl.store(gaps_ptr + gap * W + word, zeros, mask=word < W)


@triton.jit
def _gather(
    y_ptr, rows_ptr, weights_ptr, out_ptr, H, y_stride, weights_stride, K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows_ptr + token * K + k)
        weight = tl.load(weights_ptr + token * weights_stride + k)
        y = tl.load(y_ptr + row * y_stride + column, mask=(column < H) & (row >= 0), other=0.0)
        total = tl.where(row >= 0, total + y.to(tl.float32) * weight, total)
    tl.store(out_ptr + token * H + column, total.to(out_ptr.dtype.element_ty), mask=column < H)


def permute(
    x_TH: Tensor, slot_ids_TK: Tensor, num_slots: int, *, alignment: int = 1, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference, bit for bit. LOCAL; without `capacity` the host waits for the number of rows.

    Rows beyond the capacity are not written; their places in `rows` are -1.
    """
    (T, K), device = slot_ids_TK.shape, x_TH.device
    slots_TK = slot_ids_TK.contiguous()
    ranks_P, counts_s = group_ranks(slots_TK.view(-1), num_slots)
    starts_s, end = torch.empty_like(counts_s), torch.empty(1, dtype=torch.int32, device=device)
    _starts[(1,)](
        counts_s, starts_s, end, num_slots, ALIGNMENT=alignment, SP=triton.next_power_of_2(num_slots)
    )
    N = int(end) if capacity is None else capacity
    x_NH = torch.empty(N, x_TH.shape[1], dtype=x_TH.dtype, device=device)
    rows_TK = torch.empty(T, K, dtype=torch.int64, device=device)
    x_words, out_words = _words(x_TH), _words(x_NH)
    W = x_words.shape[1]
    block = block_size(W, x_words.element_size())
    _scatter[(T + num_slots, triton.cdiv(W, block))](
        x_words,
        slots_TK,
        ranks_P,
        starts_s,
        counts_s,
        rows_TK,
        out_words,
        T,
        W,
        x_words.stride(0),
        N,
        K=K,
        ALIGNMENT=alignment,
        BLOCK=block,
    )
    return x_NH, rows_TK, starts_s, counts_s


def unpermute(y_NH: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """As the reference, bit for bit: no product is fused with its sum. LOCAL."""
    (T, K), H = rows_TK.shape, y_NH.shape[1]
    out_TH = torch.empty(T, H, dtype=y_NH.dtype, device=y_NH.device)
    if y_NH.stride(1) != 1:
        y_NH = y_NH.contiguous()
    if weights_TK.stride(1) != 1:
        weights_TK = weights_TK.contiguous()
    block = block_size(H, y_NH.element_size())
    _gather[(T, triton.cdiv(H, block))](
        y_NH,
        rows_TK.contiguous(),
        weights_TK,
        out_TH,
        H,
        y_NH.stride(0),
        weights_TK.stride(0),
        K=K,
        BLOCK=block,
        enable_fp_fusion=False,
    )
    return out_TH


def block_size(columns: int, size: int) -> int:
    """Columns of `size` bytes per program: the row's, within bounds."""
    return min(int(triton.next_power_of_2(columns)), BYTES // size)


def _words(x_NH: Tensor) -> Tensor:
    """The rows as 32-bit integers if their length allows, else as integers of their own size."""
    if x_NH.stride(1) != 1:
        x_NH = x_NH.contiguous()
    size = x_NH.element_size()
    places = (x_NH.shape[1], x_NH.stride(0), x_NH.storage_offset())
    if size <= 4 and all(place * size % 4 == 0 for place in places):
        return x_NH.view(torch.int32)
    return x_NH.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Rows of bf16 and of fp8 to slots, with and without aligned starts, and back, for every model."""
    yield AotCase(
        operation="permute",
        label="starts",
        kernel=_starts,
        signature={"counts_ptr": "*i32", "starts_ptr": "*i32", "end_ptr": "*i32", "S": "i32"},
        constants={"ALIGNMENT": 128, "SP": 256},
    )
    for model in shapes.MODELS:
        for alignment in (1, 128):
            yield AotCase(
                operation="permute",
                label=f"{model.name} to slots, alignment {alignment}",
                kernel=_scatter,
                signature={
                    "x_ptr": "*i32",
                    "slots_ptr": "*i64",
                    "ranks_ptr": "*i32",
                    "starts_ptr": "*i32",
                    "counts_ptr": "*i32",
                    "rows_ptr": "*i64",
                    "out_ptr": "*i32",
                    "T": "i32",
                    "W": "i32",
                    "x_stride": "i32",
                    "capacity": "i32",
                },
                constants={
                    "K": model.top_k,
                    "ALIGNMENT": alignment,
                    "BLOCK": block_size(model.hidden // 2, 4),
                },
                aligned=frozenset({"x_ptr", "out_ptr", "W", "x_stride"}),
                streams=True,
                representative=target.name == "gfx942" and model is shapes.DEEPSEEK_V3 and alignment == 128,
            )
        yield AotCase(
            operation="permute",
            label=f"{model.name} back",
            kernel=_gather,
            signature={
                "y_ptr": "*bf16",
                "rows_ptr": "*i64",
                "weights_ptr": "*fp32",
                "out_ptr": "*bf16",
                "H": "i32",
                "y_stride": "i32",
                "weights_stride": "i32",
            },
            constants={"K": model.top_k, "BLOCK": block_size(model.hidden, 2)},
            aligned=frozenset({"y_ptr", "out_ptr", "H", "y_stride"}),
            fp_fusion=False,
            streams=True,
            representative=target.name == "sm_90" and model is shapes.DEEPSEEK_V3,
        )
