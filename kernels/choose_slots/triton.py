"""choose_slots on a GPU: every pair's point, and a binary search in its expert's cumulative table.

T tokens, K top-k, P pairs, E experts, S slots. The balanced mode needs each pair's place among its expert's
pairs (`group_ranks`), the sticky mode nothing: it is one launch.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.choose_slots.reference import Mode
from moe_runtime.kernels.group_ranks.triton import group_ranks

BLOCK = 256


@triton.jit
def _splitmix64(x):
    z = x + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _choose(
    ids_ptr,
    ranks_ptr,
    counts_ptr,
    start_ptr,
    slots_ptr,
    cumulative_ptr,
    request_ptr,
    position_ptr,
    real_ptr,
    load_ptr,
    out_ptr,
    P,
    offset,
    E: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    STICKY: tl.constexpr,
    REAL: tl.constexpr,
    LOAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = P
    if REAL:
        end = tl.minimum(P, tl.load(real_ptr) * K)
    ids = tl.load(ids_ptr + pair, mask=pair < end, other=-1).to(tl.int32)
    live = ids >= 0
    if STICKY:
        request = tl.load(request_ptr + pair // K, mask=live, other=0).to(tl.uint64, bitcast=True)
        position = tl.load(position_ptr + pair // K, mask=live, other=0).to(tl.uint64, bitcast=True)
        point = (_splitmix64(_splitmix64(request) + position) >> 48).to(tl.int32)
        if LOAD:
            tl.atomic_add(load_ptr + ids, tl.full((BLOCK,), 1, tl.int64), mask=live, sem="relaxed")
    else:
        rank = tl.load(ranks_ptr + pair, mask=live, other=0).to(tl.int64)
        count = tl.load(counts_ptr + ids, mask=live, other=1).to(tl.int64)
        point = (((2 * rank + 1) * 32768 // count + offset) & 65535).to(tl.int32)
        if LOAD:
            if tl.program_id(0) == 0:
                for first in tl.static_range(0, E, BLOCK):
                    expert = first + tl.arange(0, BLOCK)
                    total = tl.load(counts_ptr + expert, mask=expert < E, other=0).to(tl.int64)
                    tl.atomic_add(load_ptr + expert, total, mask=expert < E, sem="relaxed")
    low = tl.load(start_ptr + ids, mask=live, other=0)
    high = tl.load(start_ptr + ids + 1, mask=live, other=1)
    for _ in tl.static_range(STEPS):  # the last replica that starts at or before the point
        middle = (low + high) // 2
        starts = tl.load(cumulative_ptr + middle, mask=live, other=0).to(tl.int32)
        low, high = tl.where(starts <= point, middle, low), tl.where(starts <= point, high, middle)
    slot = tl.load(slots_ptr + low, mask=live, other=-1)
    tl.store(out_ptr + pair, slot.to(tl.int64), mask=pair < P)


def choose_slots(
    expert_ids_TK: Tensor,
    replica_start_E1: Tensor,
    replica_slots_S: Tensor,
    cumulative_S: Tensor,
    offset: int,
    *,
    mode: Mode = "balanced",
    request_T: Tensor | None = None,
    position_T: Tensor | None = None,
    real_tokens: Tensor | None = None,
    load_E: Tensor | None = None,
) -> Tensor:
    """As the reference, bit for bit. LOCAL; the host does not wait."""
    ids_TK = expert_ids_TK.contiguous()
    (T, K), experts = ids_TK.shape, len(replica_start_E1) - 1
    out_TK = torch.empty_like(ids_TK)
    unused = out_TK
    ranks_P, counts_E = unused, unused
    sticky = mode == "sticky"
    if not sticky:
        limit = None if real_tokens is None else real_tokens * K
        ranks_P, counts_E = group_ranks(ids_TK.view(-1), experts, limit=limit)
    _choose[(triton.cdiv(T * K, BLOCK),)](
        ids_TK,
        ranks_P,
        counts_E,
        replica_start_E1,
        replica_slots_S,
        cumulative_S,
        unused if request_T is None else request_T.contiguous(),
        unused if position_T is None else position_T.contiguous(),
        unused if real_tokens is None else real_tokens,
        unused if load_E is None else load_E,
        out_TK,
        T * K,
        offset,
        E=experts,
        K=K,
        STEPS=search_steps(len(replica_slots_S), experts),
        STICKY=sticky,
        REAL=real_tokens is not None,
        LOAD=load_E is not None,
        BLOCK=BLOCK,
    )
    return out_TK


def search_steps(slots: int, experts: int) -> int:
    """Halvings that leave one of an expert's replicas, of which there are at most one and all spare slots."""
    return max(slots - experts, 0).bit_length()


def aot_cases(target: Target) -> Iterator[AotCase]:
    """Both modes for every model, with 32 redundant experts."""
    for model in shapes.MODELS:
        for sticky in (False, True):
            yield AotCase(
                operation="choose_slots",
                label=f"{model.name} {'sticky' if sticky else 'balanced'}",
                kernel=_choose,
                signature={
                    "ids_ptr": "*i64",
                    "ranks_ptr": "*i32",
                    "counts_ptr": "*i32",
                    "start_ptr": "*i32",
                    "slots_ptr": "*i32",
                    "cumulative_ptr": "*u16",
                    "request_ptr": "*i64",
                    "position_ptr": "*i64",
                    "real_ptr": "*i32",
                    "load_ptr": "*i64",
                    "out_ptr": "*i64",
                    "P": "i32",
                    "offset": "i32",
                },
                constants={
                    "E": model.experts,
                    "K": model.top_k,
                    "STEPS": search_steps(model.experts + 32, model.experts),
                    "STICKY": sticky,
                    "REAL": True,
                    "LOAD": True,
                    "BLOCK": BLOCK,
                },
                aligned=frozenset({"ids_ptr", "ranks_ptr", "out_ptr"}),
                representative=target.name == "gfx942" and model is shapes.DEEPSEEK_V3 and not sticky,
            )
