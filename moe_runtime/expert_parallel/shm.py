"""The `shm` backend: ranks of one host on CPU, rows through shared memory.

A dispatch publishes each token once, in the sender's own area: its row (in the payload's dtype) and
its slot ids. A receiver looks through everybody's slot ids and copies the rows of its own slots into
order (slot, source rank, token); so a row crosses once per (token, destination rank), however many
of its slots are there. A combine writes every output row to where the sender will sum it, in the
sender's area, one row per (token, slot); the sender reads its area from end to end and sums in top-k
order in fp32. Buffers, waiting and deadlines are the mailbox'.

An area, the larger of: tokens int64 | slots int32 [M, K] | scales fp32 [M, B] | values [M, H]   (dispatch)
                        outputs [M, K, H]                                                        (combine)

T tokens of a rank, M the most of them, K top-k, R ranks, H hidden, B scale blocks, N received rows,
s slots per rank. Index work is numpy's, on CPU several times cheaper than torch's for such sizes.
"""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.expert_parallel.buffer import CombineOrder, GroupedRows, Rows
from moe_runtime.expert_parallel.mailbox import Mailbox, Transfer
from moe_runtime.expert_parallel.meter import TransportMeter
from moe_runtime.expert_parallel.pairs import weighted_sum
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.expert_parallel.where import Where
from moe_runtime.shared_memory import CACHE_LINE, Window, WindowAddress

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmSizes:
    """What every rank of an instance agrees on beforehand; offsets in bytes into an area.

    `output_dtype` is the dtype of the experts' outputs, `top_k` the most slots of a token.
    ValueError for a hidden size that the payload does not allow.
    """

    num_ranks: int
    slots_per_rank: int
    hidden: int
    top_k: int
    max_tokens: int
    payload: Payload
    output_dtype: torch.dtype

    def __post_init__(self) -> None:
        self.payload.num_scales(self.hidden)

    @property
    def slots_at(self) -> int:
        return CACHE_LINE

    @property
    def scales_at(self) -> int:
        return _line(self.slots_at + self.max_tokens * self.top_k * 4)

    @property
    def values_at(self) -> int:
        return _line(self.scales_at + self.max_tokens * self.payload.num_scales(self.hidden) * 4)

    @property
    def output_bytes(self) -> int:
        """Bytes of one row of outputs."""
        return self.hidden * self.output_dtype.itemsize

    @property
    def area_bytes(self) -> int:
        dispatch = self.values_at + self.max_tokens * self.payload.value_bytes(self.hidden)
        return max(dispatch, self.max_tokens * self.top_k * self.output_bytes)

    @property
    def window_bytes(self) -> int:
        """Of the instance, all ranks together; what is never used takes no memory."""
        return Mailbox.window_bytes(self.num_ranks, self.area_bytes)


class ShmBuffer:
    """COLLECTIVE: see `buffer.Buffer`. `connect` once, before the first dispatch.

    At most two transfers may be in flight, as two micro-batches have them.
    """

    combine_order: ClassVar[CombineOrder] = "topk_fp32"

    def __init__(self, sizes: ShmSizes, *, rank: int, timeout: float) -> None:
        self.sizes = sizes
        self.meter = TransportMeter()
        self._rank, self._timeout = rank, timeout
        self._token_M1 = np.arange(sizes.max_tokens)[:, None]
        self._mailbox: Mailbox
        self._halves: list[_Half]

    def create_window(self) -> Window:
        """LOCAL: rank 0 makes the window of the instance, and keeps it until every rank is connected."""
        sizes = self.sizes
        return Mailbox.create_window(num_ranks=sizes.num_ranks, area_bytes=sizes.area_bytes)

    def connect(self, address: WindowAddress, *, where: Where | None = None) -> None:
        """LOCAL: map the instance's window; OSError when its maker is gone. `where` is for messages."""
        self._mailbox = Mailbox.open(
            address,
            rank=self._rank,
            num_ranks=self.sizes.num_ranks,
            area_bytes=self.sizes.area_bytes,
            timeout=self._timeout,
            where=where,
        )
        self._halves = [_Half(areas, self._rank, self.sizes) for areas in self._mailbox.areas]

    def close(self) -> None:
        """LOCAL: no transfer may be in flight."""
        self._halves.clear()
        self._mailbox.close()

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> "_Dispatch":
        """Published on return; copying rows in is the work of `wait`."""
        began = time.monotonic()
        T, K = slot_ids_TK.shape
        assert self.sizes.max_tokens >= T, f"{T} rows in a round of {self.sizes.max_tokens}"
        assert self.sizes.top_k >= K, f"{K} slots per token, planned for {self.sizes.top_k}"
        transfer = self._mailbox.begin("dispatch")
        half = self._halves[transfer.half]
        slots_TK: Indices = slot_ids_TK.numpy()
        half.publish(x_TH, slots_TK, self.sizes.payload)
        transfer.post()
        self._count_dispatched(slots_TK)
        return _Dispatch(self, transfer, half, slots_TK, weights_TK, transfer.posted_at - began)

    def combine(self, y_NH: Tensor, rows: Rows) -> "_Combine":
        """All outputs are at their destination on return; the sum is the work of `wait`."""
        began = time.monotonic()
        state: _State = rows.state
        transfer = self._mailbox.begin("combine")
        half = self._halves[transfer.half]
        half.return_rows(y_NH, state)
        transfer.post()
        away = len(state.rank_N) - int(np.count_nonzero(state.rank_N == self._rank))
        self.meter.totals.bytes_combined += away * self.sizes.output_bytes
        return _Combine(self, transfer, half, state, y_NH.dtype, transfer.posted_at - began)

    def _count_dispatched(self, slots_TK: Indices) -> None:
        """What leaves this rank: a row per (token, other rank), and the slot ids to every other rank."""
        sizes, totals = self.sizes, self.meter.totals
        T = len(slots_TK)
        # Column R is for pairs that go nowhere: -1 // s is -1.
        goes_TR = np.zeros((T, sizes.num_ranks + 1), bool)
        goes_TR[self._token_M1[:T], slots_TK // sizes.slots_per_rank] = True
        rows = int(np.count_nonzero(goes_TR[:, :-1])) - int(np.count_nonzero(goes_TR[:, self._rank]))
        totals.rows_dispatched += rows
        totals.bytes_dispatched += rows * sizes.payload.row_bytes(sizes.hidden)
        totals.bytes_dispatched += (sizes.num_ranks - 1) * (8 + 4 * slots_TK.size)

    def _arrived(self, transfer: Transfer, copying: float) -> float:
        """Wait for a transfer and book it; `copying` seconds went before its post. Returns the time.

        A transfer is under way until the last rank has posted; what this rank copies itself is part of
        it and cannot be hidden.
        """
        began = time.monotonic()
        transfer.wait()
        done = time.monotonic()
        totals = self.meter.totals
        totals.busy += copying + max(0.0, transfer.complete_at - transfer.posted_at)
        totals.waited += copying + min(done - began, max(0.0, transfer.complete_at - began))
        return done

    def _copied(self, transfer: Transfer, since: float) -> None:
        """End a transfer whose rows have been copied out since `since`."""
        transfer.finish()
        copying = time.monotonic() - since
        self.meter.totals.busy += copying
        self.meter.totals.waited += copying


@dataclass(frozen=True, slots=True)
class _State:
    """Where received row n came from, and what this rank sent itself."""

    rank_N: Indices
    token_N: Indices
    k_N: Indices
    slots_TK: Indices
    weights_TK: Tensor


@dataclass(slots=True)
class _Dispatch:
    buffer: ShmBuffer
    transfer: Transfer
    half: "_Half"
    slots_TK: Indices
    weights_TK: Tensor
    copying: float

    def wait(self) -> GroupedRows:
        buffer = self.buffer
        arrived = buffer._arrived(self.transfer, self.copying)
        first = buffer._rank * buffer.sizes.slots_per_rank
        rank_N, token_N, k_N, counts_s = self.half.find(first, self.slots_TK.shape[1])
        x_NH, scales_NB = self.half.take(rank_N, token_N)
        buffer._copied(self.transfer, arrived)
        buffer.meter.totals.received_rows.append(len(rank_N))
        state = _State(rank_N, token_N, k_N, self.slots_TK, self.weights_TK)
        starts = torch.from_numpy((counts_s.cumsum() - counts_s).astype(np.int32))
        counts = torch.from_numpy(counts_s.astype(np.int32))
        return GroupedRows(x_NH, starts, counts, None, state, scales_NB)


@dataclass(slots=True)
class _Combine:
    buffer: ShmBuffer
    transfer: Transfer
    half: "_Half"
    state: _State
    dtype: torch.dtype
    copying: float

    def wait(self) -> Tensor:
        arrived = self.buffer._arrived(self.transfer, self.copying)
        T, K = self.state.slots_TK.shape
        terms_TKH = self.half.returned.view(self.dtype)[:T, :K]
        # Nobody writes the rows of pairs that went nowhere: they hold what an earlier transfer left.
        if T and self.state.slots_TK.min() < 0:
            terms_TKH[torch.from_numpy(self.state.slots_TK < 0)] = 0
        result = weighted_sum(terms_TKH, self.state.weights_TK)
        self.buffer._copied(self.transfer, arrived)
        return result


class _Half:
    """Views of one of the mailbox' buffers. Rows are moved as opaque items, whatever their dtype."""

    def __init__(self, areas: NDArray[np.uint8], rank: int, sizes: ShmSizes) -> None:
        M, K, H = sizes.max_tokens, sizes.top_k, sizes.hidden
        self._s = sizes.slots_per_rank
        self._scaled, self._dtype = sizes.payload.scaled, sizes.payload.torch_dtype
        self._rank = rank
        B = sizes.payload.num_scales(H)

        def part(start: int, num_bytes: int, item: str) -> NDArray[Any]:
            return areas[:, start : start + num_bytes].view(item)

        self._tokens_R: Indices = part(0, 8, "i8")[:, 0]
        self._slots_RMK = part(sizes.slots_at, M * K * 4, "i4").reshape(len(areas), M, K)
        self._scales_RMB = part(sizes.scales_at, M * B * 4, "f4").reshape(len(areas), M, B)
        row = sizes.payload.value_bytes(H)
        self._values_RM = part(sizes.values_at, M * row, f"V{row}")
        self._outputs_RMK = part(0, M * K * sizes.output_bytes, f"V{sizes.output_bytes}").reshape(
            len(areas), M, K
        )
        own = torch.from_numpy(areas[rank])
        values = own[sizes.values_at : sizes.values_at + M * row]
        self._own_values_MH = values.view(self._dtype).view(M, H)
        outputs_at = own[: M * K * sizes.output_bytes]
        self.returned = outputs_at.view(sizes.output_dtype).view(M, K, H)

    def publish(self, x_TH: Tensor, slots_TK: Indices, payload: Payload) -> None:
        """Write what this rank sends."""
        T, K = slots_TK.shape
        self._tokens_R[self._rank] = T
        self._slots_RMK[self._rank, :T, :K] = slots_TK
        if self._scaled:
            values, scales = payload.encode(x_TH)
            assert scales is not None
            self._own_values_MH[:T] = values
            self._scales_RMB[self._rank, :T] = scales.numpy()
        else:
            self._own_values_MH[:T] = x_TH

    def find(self, first_slot: int, K: int) -> tuple[Indices, Indices, Indices, Indices]:
        """Everybody's pairs for the `s` slots from `first_slot`, in order (slot, source rank, token).

        rank, token, k: int64 [N]; counts int64 [s].
        """
        tokens_R = self._tokens_R
        most = int(tokens_R.max())
        local_RTK = self._slots_RMK[:, :most, :K] - np.int32(first_slot)
        # As unsigned, what lies before the first slot is large.
        here_RTK = local_RTK.view(np.uint32) < self._s
        if tokens_R.min() < most:
            here_RTK &= (np.arange(most) < tokens_R[:, None])[:, :, None]
        pair_N = np.flatnonzero(here_RTK)
        slot_N = local_RTK.reshape(-1)[pair_N].astype(np.uint16)  # sorts by radix
        pair_N = pair_N[slot_N.argsort(kind="stable")]
        row_N, k_N = np.divmod(pair_N, max(K, 1))
        rank_N, token_N = np.divmod(row_N, max(most, 1))
        return rank_N, token_N, k_N, np.bincount(slot_N, minlength=self._s)

    def take(self, rank_N: Indices, token_N: Indices) -> tuple[Tensor, Tensor | None]:
        """Copies of published rows: [N, H], and scales [N, B] if there are any."""
        N, H = len(rank_N), self._own_values_MH.shape[1]
        values = self._values_RM[rank_N, token_N].view(np.uint8)
        x_NH = torch.from_numpy(values).view(self._dtype).view(N, H)
        if not self._scaled:
            return x_NH, None
        # Flat in between: of no rows with one scale each, numpy's strides are none that torch can view.
        scales = self._scales_RMB[rank_N, token_N].reshape(-1)
        return x_NH, torch.from_numpy(scales).view(N, self._scales_RMB.shape[2])

    def return_rows(self, y_NH: Tensor, state: _State) -> None:
        """Write output rows to where their senders sum them."""
        assert y_NH.dtype == self.returned.dtype, f"outputs in {y_NH.dtype}, not {self.returned.dtype}"
        if not len(y_NH):
            return  # of no rows, `contiguous` mends no strides
        rows: NDArray[Any] = y_NH.contiguous().view(torch.uint8).numpy()
        rows_N = rows.view(self._outputs_RMK.dtype)[:, 0]
        self._outputs_RMK[state.rank_N, state.token_N, state.k_N] = rows_N


def _line(offset: int) -> int:
    """Up to whole cache lines."""
    return -(-offset // CACHE_LINE) * CACHE_LINE
