"""The `torch` backend: all_to_all_single of torch.distributed, any device, any group. The reference.

One small collective tells every rank how many rows come for each of its slots, one brings the
rows; the combine is the second one backwards. Sums are taken at the source in top-k order in
fp32, so they do not depend on placement or EP degree.

T tokens, K top-k, P sent pairs (token, slot), N received rows, R ranks, s slots per rank.
"""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.expert_parallel.buffer import CombineOrder, GroupedRows
from moe_runtime.expert_parallel.meter import TransportMeter
from moe_runtime.expert_parallel.pairs import Pairs, sort_pairs, weighted_sum


@dataclass(slots=True)
class _State:
    """What the way back needs: the pairs as sent, and how received rows were reordered."""

    pairs: Pairs
    send_splits: list[int]
    receive_splits: list[int]
    by_slot_N: Tensor


class _Transfer:
    """A posted all-to-all of rows."""

    def __init__(
        self, buffer: "CollectiveBuffer", rows: Tensor, out_splits: list[int], in_splits: list[int]
    ) -> None:
        self._meter = buffer.meter
        self.received = rows.new_empty(sum(out_splits), rows.shape[1])
        self._posted = time.monotonic()
        # Rows travel as bytes: gloo does not know every dtype.
        self._work = dist.all_to_all_single(
            self.received.view(torch.uint8),
            rows.contiguous().view(torch.uint8),
            out_splits,
            in_splits,
            group=buffer.group,
            async_op=True,
        )

    def wait(self) -> Tensor:
        began = time.monotonic()
        self._work.wait()
        self._meter.transfer(posted=self._posted, wait_began=began, done=time.monotonic())
        return self.received


@dataclass(slots=True)
class _Dispatch:
    transfer: _Transfer
    state: _State
    counts_s: Tensor

    def wait(self) -> GroupedRows:
        received = self.transfer.wait()
        starts_s = torch.cumsum(self.counts_s, 0) - self.counts_s
        return GroupedRows(
            x=received[self.state.by_slot_N],
            starts=starts_s.to(torch.int32),
            counts=self.counts_s.to(torch.int32),
            weights=None,
            state=self.state,
        )


@dataclass(slots=True)
class _Combine:
    transfer: _Transfer
    pairs: Pairs

    def wait(self) -> Tensor:
        return weighted_sum(self.transfer.wait(), self.pairs)


class CollectiveBuffer:
    """COLLECTIVE: see `buffer.Buffer`. `group` None is the default process group."""

    combine_order: ClassVar[CombineOrder] = "topk_fp32"

    def __init__(self, *, slots_per_rank: int, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.meter = TransportMeter()
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        self._slots = slots_per_rank

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> _Dispatch:
        """Counts are exchanged at once (their reader must know them), rows are on their way on return."""
        pairs = sort_pairs(slot_ids_TK, weights_TK, self._ranks * self._slots)
        send_Rs = pairs.counts_S.view(self._ranks, self._slots)
        receive_Rs = torch.empty_like(send_Rs)
        began = time.monotonic()
        dist.all_to_all_single(receive_Rs, send_Rs, group=self.group)
        self.meter.transfer(posted=began, wait_began=began, done=time.monotonic())

        send_splits, receive_splits = send_Rs.sum(1).tolist(), receive_Rs.sum(1).tolist()
        slot_of_row_N = (
            torch.arange(self._slots).repeat(self._ranks).repeat_interleave(receive_Rs.flatten().cpu())
        )
        by_slot_N = torch.argsort(slot_of_row_N, stable=True).to(x_TH.device)
        state = _State(pairs, send_splits, receive_splits, by_slot_N)
        transfer = _Transfer(self, x_TH[pairs.token_P], receive_splits, send_splits)
        totals = self.meter.totals
        totals.received_rows.append(len(slot_of_row_N))
        totals.bytes_dispatched += self._wire_bytes(x_TH, send_splits) + 8 * self._slots * (self._ranks - 1)
        return _Dispatch(transfer, state, receive_Rs.sum(0))

    def combine(self, y_NH: Tensor, rows: GroupedRows) -> _Combine:
        """Bring the outputs of `rows` back to where they came from."""
        state: _State = rows.state
        back = torch.empty_like(y_NH)
        back[state.by_slot_N] = y_NH
        self.meter.totals.bytes_combined += self._wire_bytes(y_NH, state.receive_splits)
        return _Combine(_Transfer(self, back, state.send_splits, state.receive_splits), state.pairs)

    def _wire_bytes(self, rows: Tensor, splits: list[int]) -> int:
        away = sum(splits) - splits[self._rank]
        return away * rows.shape[1] * rows.element_size()
