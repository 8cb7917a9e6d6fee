"""A transport with a slow link: what another buffer delivers arrives late, as over a wire of given speed."""

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_runtime.expert_parallel.local import LocalBuffer


@dataclass
class Late:
    """A transfer that arrives at `ready`; `link` hears what this thread computed until it was waited for."""

    sent: Any
    ready: float
    link: "SlowLink"

    def __post_init__(self) -> None:
        self._computed = time.thread_time()

    def wait(self) -> Any:
        self.link.computed_meanwhile += time.thread_time() - self._computed
        time.sleep(max(0.0, self.ready - time.monotonic()))
        self.link.last_arrival = time.monotonic()
        return self.sent.wait()


class SlowLink:
    """A LocalBuffer behind one link, which carries one row after the other in either direction.

    `seconds_per_row` is what a token's row takes; a transfer begins when the link is free. So the
    link's time in a step does not depend on how the step is cut. `computed_meanwhile`: CPU seconds
    of this thread between the start of a transfer and the wait for it, summed over the transfers.
    `first_start`, `last_arrival`: of the transfers since `reset`, on the monotonic clock.
    """

    combine_order = "topk_fp32"

    def __init__(self, inner: LocalBuffer, seconds_per_row: float) -> None:
        self.inner = inner
        self.meter = inner.meter
        self._free_at = 0.0
        self._rows: list[int] = []
        self.reset(seconds_per_row)

    def reset(self, seconds_per_row: float) -> None:
        """Count from here, at this speed."""
        self.seconds_per_row = seconds_per_row
        self.transport = self.computed_meanwhile = self.last_arrival = 0.0
        self.first_start = math.inf

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> Late:
        sent = self.inner.dispatch(x_TH, slot_ids_TK, weights_TK)
        self._rows.append(len(x_TH))
        return self._send(sent, len(x_TH))

    def combine(self, y: Tensor, rows: Any) -> Late:
        # Combines come in the order of the dispatches, whatever lies between them.
        return self._send(self.inner.combine(y, rows), self._rows.pop(0))

    def _send(self, sent: Any, rows: int) -> Late:
        seconds, now = rows * self.seconds_per_row, time.monotonic()
        self.first_start = min(self.first_start, now)
        self._free_at = max(self._free_at, now) + seconds
        self.transport += seconds
        return Late(sent, self._free_at, self)
