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

from moe_runtime.expert_parallel.buffer import GroupedRows
from moe_runtime.expert_parallel.deepep.adapter import Adapter
from moe_runtime.expert_parallel.deepep.expand import (
    Expansion,
    expand,
    pair_weights,
    plan_expansion,
    reduce,
)
from moe_runtime.expert_parallel.deepep.library import Library, call
from moe_runtime.expert_parallel.deepep.meter import Combining, DeviceMeter
from moe_runtime.expert_parallel.deepep.shape import Mode, Shape
from moe_runtime.expert_parallel.payload import quantize


@dataclass(slots=True)
class _State:
    """What the way back needs: DeepEP's handle, the grouping, rows to return to other ranks."""

    handle: Any
    expansion: Expansion
    foreign_rows: Tensor


@dataclass(slots=True)
class _Dispatch:
    buffer: "NormalBuffer"
    received: tuple[Any, Tensor, Tensor]
    handle: Any
    event: Any
    tokens_per_rank_R: Tensor
    posted: float

    def wait(self) -> GroupedRows:
        buffer = self.buffer
        buffer.meter.arrive(self.event.current_stream_wait, posted=self.posted)
        x, ids_NK, weights_NK = self.received
        shape = buffer.shape
        x_NH, scales_NB = x if isinstance(x, tuple) else (x, None)
        plan = plan_expansion(ids_NK, slots=shape.slots_per_rank, alignment=buffer.alignment)
        own = self.tokens_per_rank_R[buffer.rank]
        buffer.meter.dispatched(
            received=plan.counts_s.sum(),
            sent=self.tokens_per_rank_R.sum() - own,
            row_bytes=shape.wire_row_bytes + shape.top_k * (8 + 4),
        )
        return GroupedRows(
            x=expand(x_NH, plan),
            starts=plan.starts_s,
            counts=plan.counts_s,
            weights=pair_weights(weights_NK, plan),
            state=_State(self.handle, plan, len(x_NH) - own),
            scales=None if scales_NB is None else expand(scales_NB, plan),
        )


class NormalBuffer(Adapter):
    """COLLECTIVE: see `buffer.Buffer`; `combine_order` is `backend`.

    Against the exact sum of weight x bf16 output, a result errs by at most
    ((1 + 2**-8)**3 - 1) x sum |weight x output|: it is rounded as weighted rows, as sums per rank
    and at the end. The weighted rows are the experts' business, so their epilogue is in the bound.
    """

    mode: ClassVar[Mode] = "deepep_normal"

    def __init__(
        self,
        library: Library,
        shape: Shape,
        *,
        group: Any,
        alignment: int = 1,
        meter: DeviceMeter | None = None,
    ) -> None:
        """COLLECTIVE. `group` is what DeepEP takes; groups of received rows start at multiples of
        `alignment`. PlanError names every limit that `shape` breaks.
        """
        super().__init__(library, shape, group=group, meter=meter)
        self.alignment = alignment
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
        topk_idx = self._topk_idx(slot_ids_TK)
        x = quantize(x_TH) if self.shape.fp8 else x_TH.contiguous()
        per_rank_R, per_rdma_rank, per_slot, in_rank_TR, event = call(
            self._buffer.get_dispatch_layout,
            topk_idx=topk_idx,
            num_experts=self.shape.slots,
            previous_event=self._library.buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        received_x, ids_NK, weights_NK, _, handle, event = call(
            self._buffer.dispatch,
            x=x,
            num_tokens_per_rank=per_rank_R,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank_TR,
            num_tokens_per_expert=per_slot,
            topk_idx=topk_idx,
            topk_weights=weights_TK.contiguous(),
            config=self._dispatch_config,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        return _Dispatch(self, (received_x, ids_NK, weights_NK), handle, event, per_rank_R, posted)

    def combine(self, y_NH: Tensor, rows: GroupedRows) -> Combining:
        """Sum the weighted outputs of this rank's slots per token and send the sums back."""
        posted, state = time.monotonic(), rows.state
        combined_TH, _, event = call(
            self._buffer.combine,
            x=reduce(y_NH, state.expansion),
            handle=state.handle,
            config=self._combine_config,
            previous_event=self._library.buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        self.meter.combined(sent=state.foreign_rows, row_bytes=2 * self.shape.hidden)
        return Combining(self.meter, combined_TH, event.current_stream_wait, posted)

    def _buffer_bytes(self) -> tuple[int, int]:
        """(NVLink, RDMA) bytes: what the larger of the two configurations asks for.

        These methods are compiled and take no keywords.
        """
        row, ranks = 2 * self.shape.hidden, self.shape.ranks
        configs = (self._dispatch_config, self._combine_config)
        return (
            max(c.get_nvl_buffer_size_hint(row, ranks) for c in configs),
            max(c.get_rdma_buffer_size_hint(row, ranks) for c in configs),
        )
