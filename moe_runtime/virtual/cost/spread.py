"""What a layer's experts and transfers take for one spread of the rows, apart from what ranks compute before.

Owns routed experts by rows of the heaviest rank, and transfers by what the busiest rank sends and receives.
"""

from typing import NamedTuple

from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.links import EVEN, Links, Spread
from moe_runtime.virtual.cost.rows import LayerKernels
from moe_runtime.virtual.cost.work import Work


class Load(NamedTuple):
    """One micro-batch's layer.

    even, hot          routed experts of a mean rank, and of the heaviest
    sending, receiving copy kernels of a dispatch and a combine that run in the background
    transfers          (dispatch, combine) seconds
    balanced           the same if every rank had the mean
    """

    even: Work
    hot: float
    sending: Work
    receiving: Work
    transfers: tuple[float, float]
    balanced: tuple[float, float]


class Loads(NamedTuple):
    """Where loads come from: the pieces of one instance."""

    model: ModelSpec
    setting: Setting
    links: Links

    def of(
        self,
        kernels: LayerKernels,
        mode: DispatchMode,
        background: bool,
        total: float,
        most: int,
        spread: Spread,
    ) -> Load:
        """`total` rows of all ranks, `most` of the busiest; `background`: transfers run beside compute."""
        setting, k = self.setting, self.model.moe.slots_per_token
        whole = setting.experts == "tensor_parallel"
        mean = total if whole else total / setting.ranks
        slots = float(self.model.moe.slot_experts if whole else setting.slots_per_rank)
        masked = mode == "low_latency"
        even = self._experts(kernels, mean * k, slots, masked)
        hot = even if spread.rows == 1 else self._experts(kernels, mean * k * spread.rows, slots, masked)
        sending = receiving = Work()
        busiest = most / setting.tensor_parallel
        if masked and background and not whole and setting.ranks > 1:
            sending, receiving = kernels.copies(busiest * k, mean * k)
        real = [self.links.transfer(mode, d, busiest, mean, spread) for d in (0, 1)]
        same = [self.links.transfer(mode, d, mean, mean, EVEN) for d in (0, 1)]
        return Load(even, float(hot.seconds), sending, receiving, (real[0], real[1]), (same[0], same[1]))

    @staticmethod
    def _experts(kernels: LayerKernels, rows: float, slots: float, masked: bool) -> Work:
        products = kernels.experts(rows, slots, masked=masked)
        return products.plus(kernels.stream_experts(rows, masked=masked))
