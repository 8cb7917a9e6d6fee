"""DeepEP V1 low-latency mode behind the buffer contract: decode.

One row per (token, slot) into fixed places, so shapes are static and graphs can hold it. A call issues
the send phase only; `wait` launches the receive phase (DeepEP's hook) and no SM works in between. The
combine applies the weights itself. A result's memory is reused two calls later, so at most two are
alive: two micro-batches, each waiting for one transfer.
T tokens, K top-k, H hidden, s slots of this rank, R ranks, C = R x max_tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import MaskedRows, rows_per_slot
from moe_runtime.expert_parallel.deepep.adapter import Adapter
from moe_runtime.expert_parallel.deepep.library import Library, call
from moe_runtime.expert_parallel.deepep.meter import Combining, DeviceMeter
from moe_runtime.expert_parallel.deepep.shape import Mode, Shape

MESSAGE_HEADER_BYTES = 16
BUFFER_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class _State:
    """What the way back needs; `foreign_rows`: received rows that go back to other ranks."""

    handle: Any
    topk_idx_TK: Tensor
    weights_TK: Tensor
    foreign_rows: Tensor


@dataclass(slots=True)
class _Dispatch:
    buffer: "LowLatencyBuffer"
    received: Any
    counts_s: Tensor
    handle: Any
    topk_idx_TK: Tensor
    weights_TK: Tensor
    hook: Callable[[], None]
    posted: float

    def wait(self) -> MaskedRows:
        buffer = self.buffer
        buffer.meter.arrive(self.hook, posted=self.posted)
        shape = buffer.shape
        x_sCH, scales = self.received if isinstance(self.received, tuple) else (self.received, None)
        own = _rows_of(self.topk_idx_TK, buffer.rank, shape.slots_per_rank)
        buffer.meter.dispatched(
            received=self.counts_s.sum(),
            sent=(self.topk_idx_TK >= 0).sum() - own,
            row_bytes=shape.wire_row_bytes + MESSAGE_HEADER_BYTES,
        )
        state = _State(self.handle, self.topk_idx_TK, self.weights_TK, self.counts_s.sum() - own)
        return MaskedRows(
            x=x_sCH,
            counts=self.counts_s,
            weights=None,
            state=state,
            scales=scales,
            rows_per_slot=rows_per_slot(self.topk_idx_TK, shape.slots_per_rank),
        )


class LowLatencyBuffer(Adapter):
    """COLLECTIVE: see `buffer.Buffer`, with `MaskedRows`; `combine_order` is `backend`.

    Within a slot, rows come source rank by source rank in no order of the ranks.

    Against the exact sum of weight x bf16 output a result errs by at most 2**-8 x its size (the one
    rounding to bf16) plus 2**-22 x K x sum |weight x output| (fp32 sums).
    """

    mode: ClassVar[Mode] = "deepep_low_latency"

    def __init__(
        self,
        library: Library,
        shape: Shape,
        *,
        group: Any,
        masking: bool = False,
        meter: DeviceMeter | None = None,
    ) -> None:
        """COLLECTIVE. `masking`: silent ranks can be masked (DeepEP's shrink mode), and a timeout on
        the device masks instead of trapping. UserError when this version cannot; PlanError names
        every limit that `shape` breaks.
        """
        super().__init__(library, shape, group=group, meter=meter)
        num_bytes = call(
            library.buffer.get_low_latency_rdma_size_hint,
            num_max_dispatch_tokens_per_rank=shape.max_tokens,
            hidden=shape.hidden,
            num_ranks=shape.ranks,
            num_experts=shape.slots,
        )
        self._buffer = call(
            library.buffer,
            group=group,
            num_rdma_bytes=-(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT,
            low_latency_mode=True,
            num_qps_per_rank=shape.slots_per_rank,
            explicitly_destroy=True,
            enable_shrink=masking,
        )

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> _Dispatch:
        """Issue the sends. With fp8 DeepEP quantises while it sends."""
        posted = time.monotonic()
        topk_idx_TK = self._topk_idx(slot_ids_TK)
        received, counts_s, handle, _, hook = call(
            self._buffer.low_latency_dispatch,
            x=x_TH.contiguous(),
            topk_idx=topk_idx_TK,
            num_max_dispatch_tokens_per_rank=self.shape.max_tokens,
            num_experts=self.shape.slots,
            use_fp8=self.shape.fp8,
            async_finish=False,
            return_recv_hook=True,
        )
        weights_TK = weights_TK.contiguous()
        return _Dispatch(self, received, counts_s, handle, topk_idx_TK, weights_TK, hook, posted)

    def combine(self, y_sCH: Tensor, rows: MaskedRows) -> Combining:
        """Issue the sends of all valid rows of `y_sCH`, unweighted."""
        posted, state = time.monotonic(), rows.state
        combined_TH, _, hook = call(
            self._buffer.low_latency_combine,
            x=y_sCH,
            topk_idx=state.topk_idx_TK,
            topk_weights=state.weights_TK,
            handle=state.handle,
            async_finish=False,
            return_recv_hook=True,
        )
        self.meter.combined(sent=state.foreign_rows, row_bytes=2 * self.shape.hidden)
        return Combining(self.meter, combined_TH, hook, posted)

    def clean(self) -> None:
        """COLLECTIVE: after normal-mode calls on the same memory, or an abandoned transfer."""
        call(
            self._buffer.clean_low_latency_buffer,
            num_max_dispatch_tokens_per_rank=self.shape.max_tokens,
            hidden=self.shape.hidden,
            num_experts=self.shape.slots,
        )

    def mask(self, rank: int) -> None:
        """LOCAL: neither send to nor wait for `rank` from the next call on; its slots answer nothing."""
        call(self._buffer.low_latency_update_mask_buffer, rank_to_mask=rank, mask=True)

    def unmask(self, rank: int) -> None:
        """LOCAL: `rank` takes part again."""
        call(self._buffer.low_latency_update_mask_buffer, rank_to_mask=rank, mask=False)

    def masked_ranks(self) -> tuple[int, ...]:
        """Ranks masked by `mask` or by a timeout on the device, ascending; waits for the device."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        status_R = torch.zeros(self.shape.ranks, dtype=torch.int32, device=device)
        call(self._buffer.low_latency_query_mask_buffer, mask_status=status_R)
        return tuple(torch.nonzero(status_R).flatten().tolist())


def _rows_of(topk_idx_TK: Tensor, rank: int, slots_per_rank: int) -> Tensor:
    """0-d: (token, slot) pairs that stay on `rank`."""
    first = rank * slots_per_rank
    return ((topk_idx_TK >= first) & (topk_idx_TK < first + slots_per_rank)).sum()
