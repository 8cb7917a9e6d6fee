"""Epochs: the expert loads of a deployment and the placements of its instances, as they are at the moment.

Owns that nothing is drawn twice, nor what no step runs with. L MoE layers, E experts.
"""

from dataclasses import replace
from functools import cached_property

from moe_runtime.placement.placement import Placement
from moe_runtime.report.records import F64
from moe_runtime.virtual.cluster.times import ModelTimes, StepTimes
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.shapes import StepCost, StepShape
from moe_runtime.virtual.run.history import LoadHistory
from moe_runtime.virtual.run.loads import DeploymentLoads
from moe_runtime.virtual.run.prepare import Prepared


class DrawnTimes:
    """Step times under loads and a placement, drawn when the first step asks for them."""

    def __init__(self, prepared: Prepared, loads: DeploymentLoads) -> None:
        self._prepared, self.loads = prepared, loads

    @cached_property
    def _times(self) -> ModelTimes:
        p = self._prepared
        return ModelTimes(
            p.cost if self.loads is p.loads else CostModel(p.model, p.cost.setting, self.loads.balance)
        )

    def step(self, shape: StepShape) -> StepCost:
        return self._times.step(shape)

    def run(self, shape: StepShape, steps: int) -> tuple[StepCost, StepCost]:
        return self._times.run(shape, steps)


class Epochs:
    """Of one deployment. `load_LE` is what its instances are under now, `history` what they were."""

    def __init__(self, prepared: Prepared, instances: tuple[str, ...]) -> None:
        start = prepared.assumed.placement
        self.prepared = prepared
        self.load_LE: F64 = prepared.assumed.load_LE
        self.history = LoadHistory(dict.fromkeys(instances, prepared.loads))
        self._placements = dict.fromkeys(instances, start)
        self._known = {start.digest: DrawnTimes(prepared, prepared.loads)}

    def placement(self, instance: str) -> Placement:
        """In use."""
        return self._placements[instance]

    def load(self, now: float, load_LE: F64) -> None:
        """The loads of all instances change."""
        self.load_LE = load_LE
        self._known.clear()
        for instance in self._placements:
            self.history.change(instance, now, self._drawn(instance).loads)

    def place(self, now: float, instance: str, placement: Placement) -> StepTimes:
        """The experts of an instance sit elsewhere: what its steps take."""
        self._placements[instance] = placement
        drawn = self._drawn(instance)
        self.history.change(instance, now, drawn.loads)
        return drawn

    def times(self, instance: str) -> StepTimes:
        """What its steps take now."""
        return self._drawn(instance)

    def _drawn(self, instance: str) -> DrawnTimes:
        placement = self._placements[instance]
        found = self._known.get(placement.digest)
        if found is None:
            assumed = replace(self.prepared.assumed, load_LE=self.load_LE, placement=placement)
            found = self._known[placement.digest] = DrawnTimes(self.prepared, DeploymentLoads(assumed))
        return found
