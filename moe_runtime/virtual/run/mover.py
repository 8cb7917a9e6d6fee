"""VirtualMover: what the experts of an instance on their way cost, and which placement they lead to.

Owns how a change of placement becomes moves of the cluster, as the engine does it (docs/rebalancing.md):
layers that only split anew are one unit, then one layer at a time; at most `bytes_per_step` leave a rank in a
step. Copies take their links alone. M moves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moe_runtime.engine.balancing.units import Unit, units_of
from moe_runtime.engine.balancing.wire import NewPlacement
from moe_runtime.placement.migration import MigrationPlan
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.stages import with_layers
from moe_runtime.placement.topology import Topology
from moe_runtime.spec.hardware import HARDWARE
from moe_runtime.virtual.cluster.clock import Clock
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.moving import Moves, MoveUnit
from moe_runtime.virtual.cluster.times import StepTimes
from moe_runtime.virtual.cost.moving import rebalance_seconds
from moe_runtime.virtual.run.epochs import Epochs

PARTS = 4  # times that step times are drawn anew while one attempt is under way


@dataclass(slots=True)
class _Attempt:
    """`drawn` units are in the step times; `placement` is that of the committed ones."""

    target: Placement
    units: list[Unit]
    drawn: int = 0
    committed: int = 0


@dataclass(slots=True, kw_only=True)
class VirtualMover:
    """All ranks' movers of an instance at once; a `Mover` of `engine.balancing.controller`.

    ended  is told when an attempt is over, and why if it was dropped, else ""
    aimed  the newest target
    """

    instance: Instance
    clock: Clock
    epochs: Epochs
    topology: Topology
    ended: Callable[[str], None]
    placement: Placement
    aimed: Placement | None = None
    _attempt: _Attempt | None = None
    _copied: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # As after the rehearsal, in which a rank copies a layer to its neighbour.
        size = float(self.slot_bytes)
        self._copied = [self.epochs.prepared.cost.links.bulk(size, local=True), size]

    @property
    def busy(self) -> bool:
        """An attempt is on its way."""
        return self._attempt is not None

    @property
    def slot_bytes(self) -> int:
        """Of one expert in a layer."""
        return self.epochs.prepared.slot_bytes

    @property
    def seconds_per_byte(self) -> float:
        """Of the copies made so far."""
        return self._copied[0] / self._copied[1]

    def aim(self, message: NewPlacement, now: float) -> None:
        """Go to a placement."""
        assert self._attempt is None
        self.aimed = message.target(self.placement)
        units = units_of(self.placement, self.aimed, message.moves_3M)
        if not units:
            return
        self._attempt = _Attempt(self.aimed, units)
        timeout = self.epochs.prepared.deployment.balancing.timeout_s
        costs = tuple(self._cost(unit) for unit in units)
        self.instance.move(
            Moves(units=costs, timeout=timeout, committed=self._committed, dropped=self._dropped)
        )

    def give_up(self, reason: str) -> None:
        """Have the attempt dropped, if there is one."""
        self.instance.give_up(reason)

    # -- inside -------------------------------------------------------------------------------

    def _cost(self, unit: Unit) -> MoveUnit:
        count = unit.moves_3M.shape[1]
        if not count:
            return MoveUnit(seconds=0.0)
        prepared, slots, size = self.epochs.prepared, self.placement.slots_per_rank, self.slot_bytes
        layer_M, slot_M, source_M = unit.moves_3M
        link_M = self.topology.link_class(source_M // slots, slot_M // slots)
        plan = MigrationPlan(
            layer_M=layer_M,
            slot_M=slot_M,
            source_M=source_M,
            expert_M=self.placement.slot_to_expert_LS[layer_M, source_M].astype(np.int64),
            link_M=link_M,
            topology=self.topology,
            num_layers=self.placement.num_layers,
            expert_bytes=float(size),
        )
        for link in link_M[link_M > 0].tolist():
            self._copied[0] += prepared.cost.links.bulk(float(size), local=link == 1)
            self._copied[1] += size
        leaving = int(np.bincount(source_M // slots).max()) * size
        coming = int(np.bincount(slot_M // slots).max()) * size
        return MoveUnit(
            seconds=rebalance_seconds(prepared.cost.links, plan, slots),
            turns=math.ceil(leaving / prepared.deployment.balancing.bytes_per_step),
            commit_seconds=2 * coming / HARDWARE[prepared.cost.setting.machine].memory_bandwidth,
        )

    def _committed(self, count: int) -> StepTimes | None:
        attempt = self._attempt
        assert attempt is not None
        unit = attempt.units[count - 1]
        self.placement = with_layers(self.placement, attempt.target, unit.layers)
        attempt.committed = count
        last = count == len(attempt.units)
        times = None
        if last or (count - attempt.drawn) * PARTS >= len(attempt.units):
            attempt.drawn = count
            times = self.epochs.place(self.clock.now, self.instance.name, self.placement)
        if last:
            self._attempt = None
            self.ended("")
        return times

    def _dropped(self, reason: str) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._attempt = None
        if attempt.drawn < attempt.committed:
            self.instance.set_times(self.epochs.place(self.clock.now, self.instance.name, self.placement))
        self.ended(reason)
