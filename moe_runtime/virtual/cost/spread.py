"""What a layer's experts and transfers take for one spread of the rows, apart from what ranks compute before.

Owns routed experts by rows of the heaviest rank, and transfers by what the busiest rank sends and receives.
"""

from typing import NamedTuple

from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.lanes import Transfer
from moe_runtime.virtual.cost.links import EVEN, Links, Spread
from moe_runtime.virtual.cost.rows import LayerKernels
from moe_runtime.virtual.cost.work import Work


class Load(NamedTuple):
    """One micro-batch's layer.

    even, hot          routed experts of a mean rank, and of the heaviest
    sending, receiving copy kernels of a dispatch and a combine that run in the background
    transfers          (dispatch, combine)
    balanced           seconds of them if every rank had the mean
    """

    even: Work
    hot: float
    sending: Work
    receiving: Work
    transfers: tuple[Transfer, Transfer]
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
        spreads: tuple[Spread, ...],
        *,
        total: float,
        most: int,
        background: bool,
        rounds: int,
    ) -> tuple[Load, ...]:
        """One for each of `spreads`.

        total, most  rows of all ranks, and of the busiest
        background   transfers run beside compute
        rounds       in which the rows are sent
        """
        setting, k = self.setting, self.model.moe.slots_per_token
        whole = setting.experts == "tensor_parallel"
        mean = total if whole else total / setting.ranks
        masked = mode == "low_latency"
        even = self._experts(kernels, mean * k, masked, rounds)
        sending = receiving = Work()
        busiest = most / setting.tensor_parallel
        if masked and background and not whole and setting.ranks > 1:
            sending, receiving = kernels.copies(busiest * k, mean * k, rounds)
        transfer = self.links.transfer
        same = (transfer(mode, 0, mean, mean, EVEN, rounds), transfer(mode, 1, mean, mean, EVEN, rounds))
        loads = []
        for spread in spreads:
            hot = even if spread.rows == 1 else self._experts(kernels, mean * k * spread.rows, masked, rounds)
            # A rank sends the tokens of its own batch and receives those of its experts; results go back.
            own, others = (
                [transfer(mode, d, tokens, mean, s, rounds) for d in (0, 1)]
                for tokens, s in ((busiest, EVEN), (mean, spread))
            )
            real = Transfer(own[0], others[0]), Transfer(others[1], own[1])
            loads.append(Load(even, float(hot.seconds), sending, receiving, real, same))
        return tuple(loads)

    def _experts(self, kernels: LayerKernels, rows: float, masked: bool, rounds: int) -> Work:
        """`rows` of a rank in `rounds`, each of which reads the weights anew."""
        whole = self.setting.experts == "tensor_parallel"
        slots = float(self.model.moe.slot_experts if whole else self.setting.slots_per_rank)
        products = kernels.experts(rows / rounds, slots, masked=masked)
        one = products.plus(kernels.stream_experts(rows / rounds, masked=masked))
        return one.times(rounds) if rounds > 1 else one
