"""Ranks as threads over the double, row-wise test experts and the dense reference they are held against."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import Rows
from moe_runtime.expert_parallel.deepep.elastic import ElasticRowsBuffer
from moe_runtime.expert_parallel.deepep.library import Library
from moe_runtime.expert_parallel.deepep.low_latency import LowLatencyBuffer
from moe_runtime.expert_parallel.deepep.normal import NormalBuffer
from moe_runtime.expert_parallel.deepep.shape import Shape
from moe_runtime.expert_parallel.payload import quantize
from tests.expert_parallel.deepep.double.exchange import DoubleGroup
from tests.expert_parallel.deepep.double.library import create_group_window, double_library, open_group
from tests.expert_parallel.deepep.double.scales import cast
from tests.expert_parallel.threads import run_threads

ADAPTERS = {"normal": NormalBuffer, "low_latency": LowLatencyBuffer, "elastic": ElasticRowsBuffer}
TIMEOUT = 10.0


def run_ranks(
    num_ranks: int, work: Callable[[DoubleGroup], Any], *, timeout: float = TIMEOUT, deadline: float = 60.0
) -> list[Any]:
    """`work` of every rank on a thread of its own; the first error of any rank is raised here."""
    window = create_group_window(num_ranks)

    def one(rank: int) -> Any:
        group = open_group(window.address, rank=rank, num_ranks=num_ranks, timeout=timeout)
        try:
            return work(group)
        finally:
            group.mailbox.close()

    try:
        return run_threads([partial(one, r) for r in range(num_ranks)], deadline=deadline)
    finally:
        window.close()


@dataclass(frozen=True)
class Batch:
    """What one rank dispatches."""

    x_TH: Tensor
    slot_ids_TK: Tensor
    weights_TK: Tensor


def batch(shape: Shape, tokens: int, *, seed: int, only_slots: int | None = None, drop: float = 0.0) -> Batch:
    """Random rows and distinct slots per token; `only_slots`: just the first so many; some become -1."""
    g = torch.Generator().manual_seed(seed)
    slots = shape.slots if only_slots is None else only_slots
    scores = torch.rand(tokens, slots, generator=g)
    ids = scores.argsort(dim=1)[:, : shape.top_k]
    ids = torch.where(torch.rand(ids.shape, generator=g) < drop, -1, ids)
    x = torch.randn(tokens, shape.hidden, generator=g) * torch.exp2(
        torch.randint(-3, 4, (tokens, 1), generator=g).float()
    )
    return Batch(x.bfloat16(), ids, torch.rand(tokens, shape.top_k, generator=g) + 0.1)


def factors(slots: int) -> Tensor:
    """What each slot's test expert multiplies a row with: no two alike, exact products in fp32."""
    return 1.0 + torch.arange(slots, dtype=torch.float32) / 64


def experts(rows: Rows, *, rank: int, shape: Shape) -> Tensor:
    """Row-wise experts: row x factor of the slot, rounded to bf16, then the weight; NaN where no row is."""
    first = rank * shape.slots_per_rank
    own = factors(shape.slots)[first : first + shape.slots_per_rank]
    x = rows.values(shape.dtype).float()
    flat = x.flatten(0, -2)
    y = torch.full_like(flat, torch.nan)
    weights = None if rows.weights is None else rows.weights.flatten()
    for i, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
        part = slice(start, start + count)
        out = (flat[part] * own[i]).bfloat16().float()
        y[part] = out if weights is None else out * weights[part, None]
    return y.bfloat16().view(rows.x.shape)


def dense(b: Batch, shape: Shape, mode: str) -> tuple[Tensor, Tensor]:
    """fp64 [T, H]: sum of weight x (bf16 expert output), and the sum of the terms' sizes."""
    x = b.x_TH
    if shape.fp8:
        # Low-latency mode casts by itself: multiplied by 448 / amax, not divided by the scale.
        values, scales = cast(x, round_scale=False) if mode == "low_latency" else quantize(x)
        blocks = values.float().view(len(x), x.shape[1] // 128, 128)
        x = (blocks * scales[..., None]).view(x.shape).bfloat16()
    factor = factors(shape.slots)
    total = torch.zeros(x.shape, dtype=torch.float64)
    size = torch.zeros_like(total)
    for k in range(shape.top_k):
        ids = b.slot_ids_TK[:, k]
        y = (x.float() * factor[ids.clamp(min=0), None]).bfloat16().double()
        term = torch.where((ids >= 0)[:, None], b.weights_TK[:, k, None].double() * y, 0.0)
        total += term
        size += term.abs()
    return total, size


def bound(mode: str, total: Tensor, size: Tensor, shape: Shape) -> Tensor:
    """The adapters' documented bounds: one rounding to bf16, or three on the way."""
    u = 2.0**-8
    fp32 = 2.0**-22 * shape.top_k * size
    tiny = 2.0**-130  # bf16 subnormals
    if mode == "low_latency":
        return u * total.abs() + fp32 * 2 + tiny
    return ((1 + u) ** 3 - 1) * size + fp32 * 2 + tiny


def exchange(buffer: Any, b: Batch, *, rank: int) -> tuple[Rows, Tensor]:
    """One dispatch and combine."""
    rows = buffer.dispatch(b.x_TH, b.slot_ids_TK, b.weights_TK).wait()
    y = experts(rows, rank=rank, shape=buffer.shape)
    return rows, buffer.combine(y, rows).wait()


def build(mode: str, shape: Shape, group: DoubleGroup, *, library: Library | None = None, **more: Any) -> Any:
    return ADAPTERS[mode](library or double_library(), shape, group=group, **more)
