"""The `local` backend: EP degree 1. Nothing travels; rows are only sorted by slot and summed back."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import CombineOrder, RowLayout, Rows
from moe_runtime.expert_parallel.meter import TransportMeter
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.expert_parallel.rows import arrange, outputs
from moe_runtime.kernels.registry import Kernel, select


@dataclass(slots=True)
class _State:
    rows_TK: Tensor
    weights_TK: Tensor


@dataclass(slots=True)
class _Dispatched:
    rows: Rows

    def wait(self) -> Rows:
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
    EP degree; None leaves them as they are. `max_tokens` is needed for the masked layout only.
    """

    combine_order: ClassVar[CombineOrder] = "topk_fp32"

    def __init__(
        self,
        *,
        slots_per_rank: int,
        payload: Payload | None = None,
        layout: RowLayout = "grouped",
        max_tokens: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.meter = TransportMeter()
        self._slots = slots_per_rank
        self._payload = payload
        self._capacity = max_tokens if layout == "masked" else None
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
        rows = arrange(x_NH, scales_NB, starts_s, counts_s, capacity=self._capacity, state=state)
        return _Dispatched(rows)

    def combine(self, y: Tensor, rows: Rows) -> _Combined:
        """The weighted sum of `y`."""
        return _Combined(outputs(y, rows), rows.state, self._unpermute)
