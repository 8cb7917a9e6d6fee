"""DeepEP V2 `ElasticBuffer` behind the buffer contract: prefill and decode, without a host wait.

`do_expand`: one row per (token, slot), grouped by slot with aligned starts; `do_cpu_sync=False`:
outputs have the worst-case number of rows, and the real counts are on the device as prefix sums. The
combine adds rows up without weights, so the expert epilogue multiplies (`rows.weights`).
T tokens, K top-k, N rows (worst case), H hidden, s slots of this rank.
"""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_runtime.errors import UnavailableError
from moe_runtime.expert_parallel.buffer import GroupedRows
from moe_runtime.expert_parallel.deepep.adapter import Adapter
from moe_runtime.expert_parallel.deepep.library import Library, call
from moe_runtime.expert_parallel.deepep.meter import Combining
from moe_runtime.expert_parallel.deepep.shape import Mode, Shape
from moe_runtime.expert_parallel.pairs import visits
from moe_runtime.expert_parallel.payload import quantize


@dataclass(frozen=True, slots=True)
class _State:
    handle: Any
    foreign_rows: Tensor


@dataclass(slots=True)
class _Dispatch:
    buffer: "ElasticRowsBuffer"
    received: Any
    weights_N: Tensor
    handle: Any
    event: Any
    topk_idx_TK: Tensor
    posted: float

    def wait(self) -> GroupedRows:
        buffer = self.buffer
        buffer.meter.arrive(self.event.current_stream_wait, posted=self.posted)
        shape, x = buffer.shape, self.received
        x_NH, scales_NB = x if isinstance(x, tuple) else (x, None)
        starts_s, counts_s = starts_and_counts(
            self.handle.psum_num_recv_tokens_per_expert, self.handle.expert_alignment
        )
        to_rank_TR = visits(self.topk_idx_TK, num_ranks=shape.ranks, slots_per_rank=shape.slots_per_rank)
        own = to_rank_TR[:, buffer.rank].sum()
        buffer.meter.dispatched(
            received=counts_s.sum(),
            sent=to_rank_TR.sum() - own,
            row_bytes=shape.wire_row_bytes + (3 * shape.top_k + 1) * 4,
        )
        received_rows = self.handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        return GroupedRows(
            x=x_NH,
            starts=starts_s,
            counts=counts_s,
            weights=self.weights_N,
            state=_State(self.handle, received_rows - own),
            scales=scales_NB,
        )


class ElasticRowsBuffer(Adapter):
    """COLLECTIVE: see `buffer.Buffer`; `combine_order` is `backend`, the bound is that of `NormalBuffer`.

    Rows past the last group are not initialised, and neither are their weights. The order of rows
    within a slot is (source rank, token) only if `deterministic`.
    """

    mode: ClassVar[Mode] = "deepep_elastic"

    def __init__(
        self,
        library: Library,
        shape: Shape,
        *,
        group: Any,
        alignment: int = 1,
        deterministic: bool = False,
        timeout_seconds: int = 100,
    ) -> None:
        """COLLECTIVE. `timeout_seconds`: how long DeepEP waits for a rank before it ends the process's
        CUDA context; V2 cannot mask ranks. PlanError names every limit that `shape` breaks.
        """
        super().__init__(library, shape, group=group, meter=None)
        if library.elastic_buffer is None:
            raise UnavailableError("deep_ep >= 2 (ElasticBuffer)", "dispatch.backend: deepep", "deepep")
        self.alignment = alignment
        self._buffer = call(
            library.elastic_buffer,
            group=group,
            num_max_tokens_per_rank=shape.max_tokens,
            hidden=shape.hidden,
            num_topk=shape.top_k,
            use_fp8_dispatch=shape.fp8,
            deterministic=deterministic,
            num_cpu_timeout_secs=timeout_seconds,
            num_gpu_timeout_secs=timeout_seconds,
            explicitly_destroy=True,
        )

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> _Dispatch:
        """Nothing waits; the slots of a token have to be distinct."""
        posted = time.monotonic()
        topk_idx_TK = self._topk_idx(slot_ids_TK)
        received, _, weights_N, handle, event = call(
            self._buffer.dispatch,
            x=quantize(x_TH) if self.shape.fp8 else x_TH.contiguous(),
            topk_idx=topk_idx_TK,
            topk_weights=weights_TK.contiguous(),
            num_experts=self.shape.slots,
            num_max_tokens_per_rank=self.shape.max_tokens,
            expert_alignment=self.alignment,
            previous_event=self._library.elastic_buffer.capture(),
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
            do_cpu_sync=False,
            do_expand=True,
            do_zero_padding=self.alignment > 1,
        )
        return _Dispatch(self, received, weights_N, handle, event, topk_idx_TK, posted)

    def combine(self, y_NH: Tensor, rows: GroupedRows) -> Combining:
        """Send the weighted outputs back; DeepEP sums those of a token per rank, then over ranks."""
        posted = time.monotonic()
        combined_TH, _, event = call(
            self._buffer.combine,
            x=y_NH.contiguous(),
            handle=rows.state.handle,
            previous_event=self._library.elastic_buffer.capture(),
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
        )
        self.meter.combined(sent=rows.state.foreign_rows, row_bytes=2 * self.shape.hidden)
        return Combining(self.meter, combined_TH, event.current_stream_wait, posted)


def starts_and_counts(psum_s: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """int32 [s] each, from DeepEP's prefix sums: psum[i] = aligned start of slot i + its count."""
    ends_s = (psum_s + alignment - 1) // alignment * alignment
    starts_s = torch.cat([ends_s.new_zeros(1), ends_s[:-1]]).to(torch.int32)
    return starts_s, psum_s.to(torch.int32) - starts_s
