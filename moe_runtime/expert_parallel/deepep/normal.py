"""DeepEP V1 normal mode behind the buffer contract: prefill.

A dispatch delivers one row per (token, destination rank); this adapter sorts the rows by slot and,
on the way back, sums what the slots of this rank made of a token, because DeepEP's combine adds ranks
up without weights. The weights are therefore given to the expert epilogue (`rows.weights`).

The host waits inside `dispatch` until the counts of all ranks are known: not for graphs.
T tokens, K top-k, N received rows, H hidden, s slots of this rank, R ranks.
"""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from moe_runtime.expert_parallel.buffer import CombineOrder, GroupedRows
from moe_runtime.expert_parallel.deepep.expand import (
    Expansion,
    expand,
    pair_weights,
    plan_expansion,
    reduce,
)
from moe_runtime.expert_parallel.deepep.fp8 import dequantize, quantize
from moe_runtime.expert_parallel.deepep.library import Library, call
from moe_runtime.expert_parallel.deepep.meter import DeviceMeter
from moe_runtime.expert_parallel.deepep.shape import Shape


@dataclass(slots=True)
class _State:
    """What the way back needs."""

    handle: Any
    expansion: Expansion
    returned: Tensor


@dataclass(slots=True)
class _Dispatch:
    buffer: "NormalBuffer"
    received: tuple[Any, Tensor, Tensor]
    handle: Any
    event: Any
    returned: Tensor
    posted: float

    def wait(self) -> GroupedRows:
        began = time.monotonic()
        self.event.current_stream_wait()
        self.buffer.meter.transfer(posted=self.posted, wait_began=began, done=time.monotonic())
        x, ids_NK, weights_NK = self.received
        shape = self.buffer.shape
        x_NH = dequantize(*x, shape.dtype) if isinstance(x, tuple) else x
        plan = plan_expansion(ids_NK, slots=shape.slots_per_rank, alignment=self.buffer.alignment)
        self.buffer.meter.totals.received_rows.append(len(plan.token_P))
        return GroupedRows(
            x=expand(x_NH, plan),
            starts=plan.starts_s,
            counts=plan.counts_s,
            weights=pair_weights(weights_NK, plan),
            state=_State(self.handle, plan, self.returned),
        )


@dataclass(slots=True)
class _Combine:
    meter: DeviceMeter
    combined_TH: Tensor
    event: Any
    posted: float

    def wait(self) -> Tensor:
        began = time.monotonic()
        self.event.current_stream_wait()
        self.meter.transfer(posted=self.posted, wait_began=began, done=time.monotonic())
        return self.combined_TH


class NormalBuffer:
    """COLLECTIVE: see `buffer.Buffer`. `combine_order` is `backend`: bf16 sums per rank, then over ranks.

    Against a sum of the experts' bf16 outputs in exact arithmetic the result errs by at most
    ((1 + 2**-8)**3 - 1) x sum |weight x output|: rounded once as weighted rows, once as sums per
    rank, once at the end.
    """

    combine_order: ClassVar[CombineOrder] = "backend"

    def __init__(self, library: Library, shape: Shape, *, group: Any, alignment: int = 1) -> None:
        """COLLECTIVE. `alignment`: groups of received rows start at multiples of it.

        PlanError names every limit that `shape` breaks.
        """
        shape.require("deepep_normal")
        self.shape, self.alignment = shape, alignment
        self.meter = DeviceMeter()
        self._library, self._rank = library, group.rank()
        self._dispatch_config = library.buffer.get_dispatch_config(shape.ranks)
        self._combine_config = library.buffer.get_combine_config(shape.ranks)
        nvl_bytes, rdma_bytes = self._buffer_bytes()
        self._buffer = call(
            library.buffer,
            group=group,
            num_nvl_bytes=nvl_bytes,
            num_rdma_bytes=rdma_bytes,
            low_latency_mode=False,
            explicitly_destroy=True,
        )

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> _Dispatch:
        """Returns when the counts of all ranks are known; rows may still be on their way."""
        posted = time.monotonic()
        assert len(x_TH) <= self.shape.max_tokens, "more rows than a round carries"
        topk_idx = slot_ids_TK.to(self._library.topk_idx_dtype).contiguous()
        x = quantize(x_TH) if self.shape.fp8 else x_TH.contiguous()
        buffer, event = self._buffer, self._library.buffer.capture()
        layout = call(
            buffer.get_dispatch_layout,
            topk_idx=topk_idx,
            num_experts=self.shape.slots,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        per_rank, per_rdma_rank, per_expert, in_rank, event = layout
        received_x, received_idx, received_weights, _, handle, event = call(
            buffer.dispatch,
            x=x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=weights_TK.contiguous(),
            expert_alignment=self.alignment,
            config=self._dispatch_config,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait() if self._meters_now(per_rank) else None
        return _Dispatch(
            buffer=self,
            received=(received_x, received_idx, received_weights),
            handle=handle,
            event=event,
            returned=per_rank,
            posted=posted,
        )

    def combine(self, y_NH: Tensor, rows: GroupedRows) -> _Combine:
        """Sum the weighted outputs of this rank's slots per token, and send the sums back."""
        raise NotImplementedError
