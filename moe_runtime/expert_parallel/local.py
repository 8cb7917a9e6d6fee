"""The `local` backend: EP degree 1. Nothing travels; rows are only sorted by slot and summed back."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import CombineOrder, GroupedRows, Rows
from moe_runtime.expert_parallel.meter import TransportMeter
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.kernels.registry import Kernel, select


@dataclass(slots=True)
class _State:
    rows_TK: Tensor
    weights_TK: Tensor


@dataclass(slots=True)
class _Dispatched:
    rows: GroupedRows

    def wait(self) -> GroupedRows:
        return self.rows


@dataclass(slots=True)
class _Combined:
    y_NH: Tensor
    state: _State
    unpermute: Kernel

    def wait(self) -> Tensor:
        result: Tensor = self.unpermute(self.y_NH, self.state.rows_TK, self.state.weights_TK)
        return result


class LocalBuffer:
    """LOCAL: see `buffer.Buffer`; the arithmetic is that of every `topk_fp32` backend, bit for bit.

    `payload`: rows are converted as they would be for sending, so that results do not depend on the
    EP degree; None leaves them as they are.
    """

    combine_order: ClassVar[CombineOrder] = "topk_fp32"

    def __init__(
        self,
        *,
        slots_per_rank: int,
        payload: Payload | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.meter = TransportMeter()
        self._slots = slots_per_rank
        self._payload = payload
        kind = device.type if device else "cpu"
        self._permute, self._unpermute = select("permute", kind), select("unpermute", kind)

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> _Dispatched:
        """Rows in order (slot, token)."""
        x_NH, rows_TK, starts_s, counts_s = self._permute(x_TH, slot_ids_TK, self._slots)
        scales_NB = None
        if self._payload is not None:
            x_NH, scales_NB = self._payload.encode(x_NH)
        self.meter.totals.received_rows.append(len(x_NH))
        state = _State(rows_TK, weights_TK)
        return _Dispatched(GroupedRows(x_NH, starts_s, counts_s, None, state, scales_NB))

    def combine(self, y_NH: Tensor, rows: Rows) -> _Combined:
        """The weighted sum of `y_NH`."""
        return _Combined(y_NH, rows.state, self._unpermute)
