"""A transport meter whose counts may still be on the device when they are booked, and a combine it times."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from moe_runtime.expert_parallel.meter import TransportMeter, TransportTotals


@dataclass(slots=True)
class _Pending:
    """Row counts as 0-d tensors, and what a row weighs on the wire."""

    received: list[Tensor] = field(default_factory=list)
    dispatched: list[tuple[Tensor, int]] = field(default_factory=list)
    combined: list[tuple[Tensor, int]] = field(default_factory=list)


class DeviceMeter(TransportMeter):
    """Reads the device once, in `take`, which the engine calls when the step's tokens are out anyway.

    For eager steps: a step replayed from a graph books nothing here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pending = _Pending()

    def arrive(self, finish: Callable[[], object], *, posted: float) -> None:
        """Book a transfer posted at `posted`; `finish` ends it: a wait for its event, or the receive hook."""
        began = time.monotonic()
        finish()
        self.transfer(posted=posted, wait_began=began, done=time.monotonic())

    def dispatched(self, *, received: Tensor, sent: Tensor, row_bytes: int) -> None:
        """Book a dispatch: rows received from anywhere, rows sent to other ranks (0-d tensors)."""
        self._pending.received.append(received)
        self._pending.dispatched.append((sent, row_bytes))

    def combined(self, *, sent: Tensor, row_bytes: int) -> None:
        """Book a combine: rows sent back to other ranks (0-d tensor)."""
        self._pending.combined.append((sent, row_bytes))

    def take(self) -> TransportTotals:
        """The totals since the last call; waits for the device."""
        pending, self._pending = self._pending, _Pending()
        totals = super().take()
        totals.received_rows += [int(n) for n in pending.received]
        totals.rows_dispatched += sum(int(n) for n, _ in pending.dispatched)
        totals.bytes_dispatched += sum(int(n) * size for n, size in pending.dispatched)
        totals.bytes_combined += sum(int(n) * size for n, size in pending.combined)
        return totals


@dataclass(slots=True)
class Combining:
    """A combine under way: its result [T, H] is complete after `finish` (see `DeviceMeter.arrive`)."""

    meter: DeviceMeter
    combined_TH: Tensor
    finish: Callable[[], object]
    posted: float

    def wait(self) -> Tensor:
        self.meter.arrive(self.finish, posted=self.posted)
        return self.combined_TH
