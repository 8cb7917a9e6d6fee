"""Account: adds up a step's seconds twice, by part and by what bounds them, so that both sum to the whole."""

from moe_runtime.virtual.cost.shapes import BOUNDS, PARTS, Bound, Part, StepCost
from moe_runtime.virtual.cost.work import Work


class Account:
    """Seconds so far. Every entry takes `times`, how often it happens in the step."""

    def __init__(self) -> None:
        self._parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._bounds: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
        self._busy = self._exposed = 0.0

    def work(self, part: Part, work: Work, times: float) -> None:
        """Kernels; their starts count as launch."""
        compute, memory, start = work
        self._parts[part] += (compute + memory) * times
        self._parts["launch"] += start * times
        self._bounds["compute"] += compute * times
        self._bounds["hbm"] += memory * times
        self._bounds["launch"] += start * times

    def wait(self, seconds: float, times: float) -> None:
        """Time lost to other ranks' larger load."""
        self._parts["imbalance"] += seconds * times
        self._bounds["imbalance"] += seconds * times

    def transfer(self, part: Part, exposed: float, real: float, even: float, times: float) -> None:
        """Exposed seconds of a transfer that takes `real`, and `even` if all ranks had the mean load."""
        own = exposed * (even / real if real > 0 else 1.0)
        self._parts[part] += own * times
        self._bounds["link"] += own * times
        self._exposed += exposed * times
        self.wait(exposed - own, times)

    def collective(self, seconds: float, times: float) -> None:
        """All-reduces of tensor parallelism: never hidden."""
        self._parts["collective"] += seconds * times
        self._bounds["link"] += seconds * times
        self._exposed += seconds * times
        self._busy += seconds * times

    def busy(self, seconds: float, times: float) -> None:
        """Links are in use, seen or not."""
        self._busy += seconds * times

    def cost(self, ideal: float) -> StepCost:
        return StepCost(
            seconds=sum(self._parts.values()),
            parts=self._parts,
            bounds=self._bounds,
            communication=self._busy,
            exposed=self._exposed,
            ideal=ideal,
        )
