"""What a layer's experts and transfers take for one spread of the rows, apart from what ranks compute before.

Owns routed experts by rows of the heaviest rank, and transfers by what the busiest rank sends and receives.
"""

from typing import NamedTuple

from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.links import Links, Spread
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
        rows: tuple[float, int],
        spreads: tuple[Spread, ...],
    ) -> tuple[Load, ...]:
        """`rows`: of all ranks, and of the busiest; `background`: transfers run beside compute."""
        setting, k = self.setting, self.model.moe.slots_per_token
        whole = setting.experts == "tensor_parallel"
        mean = rows[0] if whole else rows[0] / setting.ranks
        slots = float(self.model.moe.slot_experts if whole else setting.slots_per_rank)
        masked = mode == "low_latency"
        even = self._experts(kernels, mean * k, slots, masked)
        sending = receiving = Work()
        busiest = rows[1] / setting.tensor_parallel
        if masked and background and not whole and setting.ranks > 1:
            sending, receiving = kernels.copies(busiest * k, mean * k)
        transfer = self.links.transfer
        same = (transfer(mode, 0, mean, mean), transfer(mode, 1, mean, mean))
        loads = []
        for spread in spreads:
            hot = even if spread.rows == 1 else self._experts(kernels, mean * k * spread.rows, slots, masked)
            real = (
                transfer(mode, 0, busiest, mean, spread),
                transfer(mode, 1, busiest, mean, spread),
            )
            loads.append(Load(even, float(hot.seconds), sending, receiving, real, same))
        return tuple(loads)

    @staticmethod
    def _experts(kernels: LayerKernels, rows: float, slots: float, masked: bool) -> Work:
        products = kernels.experts(rows, slots, masked=masked)
        return products.plus(kernels.stream_experts(rows, masked=masked))
