"""The `torch` backend: all_to_all_single of torch.distributed, any device, any group. The reference.

Two collectives per dispatch: how many rows come from each rank, then the rows, each with its slot ids
(and scales, if fp8) in one message. A row travels once per (token, destination rank), and is copied to
each of its slots there. One collective per combine brings a row per (token, slot). Sums are taken at
the source in top-k order in fp32, so they do not depend on placement or EP degree.

A message, bytes: slot ids int32 [K] | scales fp32 [B] | values [H] | padding to a multiple of 8.
T tokens, K top-k, U messages sent, V received, N received rows, R ranks, s slots per rank.
"""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.expert_parallel.buffer import CombineOrder, GroupedRows, Rows
from moe_runtime.expert_parallel.meter import TransportMeter
from moe_runtime.expert_parallel.pairs import destinations, local_pairs, returning_rows
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.expert_parallel.roll_call import NO_CALL, Call, NoCall, RollCall
from moe_runtime.expert_parallel.where import Where
from moe_runtime.kernels.registry import Kernel, select
from moe_runtime.shared_memory import Window, WindowAddress


@dataclass(slots=True)
class _State:
    """What the way back needs: this rank's own pairs, and how received rows go back in order."""

    slot_ids_TK: Tensor
    weights_TK: Tensor
    back_N: Tensor
    back_splits: list[int]


class _Transfer:
    """A posted all-to-all of rows, as bytes: gloo does not know every dtype."""

    def __init__(
        self,
        buffer: "CollectiveBuffer",
        operation: str,
        rows: Tensor,
        out_splits: list[int],
        in_splits: list[int],
    ) -> None:
        self._meter = buffer.meter
        self._sent = rows.contiguous()
        self.received = rows.new_empty(sum(out_splits), rows.shape[1])
        self._posted = time.monotonic()
        self._call = buffer.begin(operation)
        with self._call.explained():
            self._work = dist.all_to_all_single(
                self.received.view(torch.uint8),
                self._sent.view(torch.uint8),
                out_splits,
                in_splits,
                group=buffer.group,
                async_op=True,
            )

    def wait(self) -> Tensor:
        began = time.monotonic()
        with self._call.explained():
            self._work.wait()
        self._meter.transfer(posted=self._posted, wait_began=began, done=time.monotonic())
        return self.received


@dataclass(slots=True)
class _Dispatch:
    buffer: "CollectiveBuffer"
    transfer: _Transfer
    receive_splits: list[int]
    x_dtype: torch.dtype
    hidden: int
    slot_ids_TK: Tensor
    weights_TK: Tensor

    def wait(self) -> GroupedRows:
        return self.buffer._unpack(self, self.transfer.wait())


@dataclass(slots=True)
class _Combine:
    transfer: _Transfer
    rows_TK: Tensor
    weights_TK: Tensor
    unpermute: Kernel

    def wait(self) -> Tensor:
        result: Tensor = self.unpermute(self.transfer.wait(), self.rows_TK, self.weights_TK)
        return result


class CollectiveBuffer:
    """COLLECTIVE: see `buffer.Buffer`. `group` None is the default process group.

    `payload` None sends rows in their own dtype.
    The group's timeout is the deadline of every wait; `connect` makes errors name who is missing.
    """

    combine_order: ClassVar[CombineOrder] = "topk_fp32"

    def __init__(
        self,
        *,
        slots_per_rank: int,
        payload: Payload | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.group = group
        self.meter = TransportMeter()
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        self._slots = slots_per_rank
        self._payload = payload
        self._unpermute = select("unpermute", device.type if device else "cpu")
        self._roll: RollCall | None = None

    @staticmethod
    def create_window(num_ranks: int) -> Window:
        """LOCAL: one rank per host makes the window of that host, and keeps it until all have connected."""
        return RollCall.create_window(num_ranks)

    def connect(self, address: WindowAddress, *, here: range, where: Where | None = None) -> None:
        """LOCAL: map the window of this host, whose ranks are `here`; OSError when its maker is gone."""
        self._roll = RollCall.open(address, rank=self._rank, here=here, num_ranks=self._ranks, where=where)

    def begin(self, operation: str) -> "Call | NoCall":
        """LOCAL: this rank comes to its next collective."""
        return NO_CALL if self._roll is None else self._roll.begin(operation)

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> _Dispatch:
        """Counts are exchanged at once (their reader must know them), rows are on their way on return."""
        messages_T = self._pack(x_TH, slot_ids_TK)
        token_U, send_R = destinations(slot_ids_TK, num_ranks=self._ranks, slots_per_rank=self._slots)
        receive_R = torch.empty_like(send_R)
        began = time.monotonic()
        with self.begin("dispatch").explained():
            dist.all_to_all_single(receive_R, send_R, group=self.group)
        self.meter.transfer(posted=began, wait_began=began, done=time.monotonic())

        send_splits, receive_splits = send_R.tolist(), receive_R.tolist()
        messages = messages_T.index_select(0, token_U)
        transfer = _Transfer(self, "dispatch", messages, receive_splits, send_splits)
        away = sum(send_splits) - send_splits[self._rank]
        self.meter.totals.rows_dispatched += away
        self.meter.totals.bytes_dispatched += away * messages.shape[1] + 8 * (self._ranks - 1)
        return _Dispatch(self, transfer, receive_splits, x_TH.dtype, x_TH.shape[1], slot_ids_TK, weights_TK)

    def combine(self, y_NH: Tensor, rows: Rows) -> _Combine:
        """Bring the outputs of `rows` back to where they came from."""
        state: _State = rows.state
        back_NH = y_NH.index_select(0, state.back_N)
        rows_TK = returning_rows(state.slot_ids_TK, slots_per_rank=self._slots)
        ranks_P = torch.div(state.slot_ids_TK, self._slots, rounding_mode="floor").reshape(-1) + 1
        come_splits = torch.bincount(ranks_P, minlength=self._ranks + 1)[1:].tolist()
        away = len(back_NH) - state.back_splits[self._rank]
        self.meter.totals.bytes_combined += away * back_NH.shape[1] * back_NH.element_size()
        transfer = _Transfer(self, "combine", back_NH, come_splits, state.back_splits)
        return _Combine(transfer, rows_TK, state.weights_TK, self._unpermute)

    def _pack(self, x_TH: Tensor, slot_ids_TK: Tensor) -> Tensor:
        """uint8 [T, message bytes]: one message per token."""
        values_TH, scales_TB = (x_TH, None) if self._payload is None else self._payload.encode(x_TH)
        parts = [slot_ids_TK.to(torch.int32), *([] if scales_TB is None else [scales_TB]), values_TH]
        sizes = [p.shape[1] * p.element_size() for p in parts]
        messages = values_TH.new_empty(len(values_TH), -(-sum(sizes) // 8) * 8, dtype=torch.uint8)
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            messages[:, start : start + size].view(part.dtype).copy_(part)
            start += size
        return messages

    def _unpack(self, sent: _Dispatch, messages: Tensor) -> GroupedRows:
        """Messages uint8 [V, message bytes] to rows in order (slot, source rank, token)."""
        K, H = sent.slot_ids_TK.shape[1], sent.hidden
        dtype = sent.x_dtype if self._payload is None else self._payload.torch_dtype
        scale_bytes = 0 if self._payload is None else 4 * self._payload.num_scales(H)
        pair_N, counts_s = local_pairs(
            messages[:, : 4 * K].view(torch.int32), first_slot=self._rank * self._slots, num_slots=self._slots
        )
        row_N = pair_N // max(K, 1)
        start = 4 * K + scale_bytes
        x_NH = messages[:, start : start + H * dtype.itemsize].index_select(0, row_N).view(dtype)
        scales_NB = None
        if scale_bytes:
            scales_NB = messages[:, 4 * K : start].index_select(0, row_N).view(torch.float32)
        ends_R = torch.tensor(sent.receive_splits, device=row_N.device).cumsum(0)
        source_N = torch.bucketize(row_N, ends_R, right=True)
        state = _State(
            slot_ids_TK=sent.slot_ids_TK,
            weights_TK=sent.weights_TK,
            back_N=pair_N.argsort(),
            back_splits=torch.bincount(source_N, minlength=self._ranks).tolist(),
        )
        self.meter.totals.received_rows.append(len(row_N))
        starts_s = (counts_s.cumsum(0) - counts_s).to(torch.int32)
        return GroupedRows(x_NH, starts_s, counts_s.to(torch.int32), None, state, scales_NB)
