"""What it takes to move experts while an instance serves: seconds per unit, and step times afterwards.

Owns how a change of placement becomes a scripted event of the cluster, as the engine does it
(docs/rebalancing.md): layers that only split anew are one unit, then one layer at a time; at most
`bytes_per_step` leave a rank in a step.
"""

import math
from dataclasses import replace

import numpy as np

from moe_runtime.placement.migration import MigrationPlan, plan_migration
from moe_runtime.placement.topology import Topology
from moe_runtime.spec.hardware import HARDWARE
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cluster.events import Rebalance
from moe_runtime.virtual.cluster.times import ModelTimes
from moe_runtime.virtual.cost.moving import rebalance_seconds
from moe_runtime.virtual.cost.shapes import decode_step
from moe_runtime.virtual.cost.work import value_bytes
from moe_runtime.virtual.run.prepare import Prepared


def rebalance(instance: str, at: float, before: Prepared, after: Prepared) -> Rebalance:
    """Move the experts of an instance from one placement to another, `at` virtual seconds."""
    a = before.assumed
    ranks, per_node = a.placement.num_ranks, a.ranks_per_node
    nodes = ranks // per_node if ranks % per_node == 0 else 1
    topology = Topology(nodes=nodes, ranks_per_node=ranks // nodes)
    size = expert_bytes(before.model, before.cost.setting.precision.experts)
    moves = plan_migration(a.placement, after.assumed.placement, topology, size)
    layers = [_of_layer(moves, layer) for layer in np.flatnonzero(moves.moves_L).tolist()]
    slots = a.placement.slots_per_rank
    shortest = before.cost.step(decode_step(ranks, 1, 1)).seconds
    paced = before.deployment.balancing.bytes_per_step
    stage, commit = [0.0], 0.0
    for one in layers:
        leaving = int(np.bincount(one.source_M // slots).max()) * size
        stage.append(
            max(rebalance_seconds(before.cost.links, one, slots), (math.ceil(leaving / paced) - 1) * shortest)
        )
        coming = int(np.bincount(one.slot_M // slots).max()) * size
        commit = max(commit, 2 * coming / HARDWARE[before.cost.setting.machine].memory_bandwidth)
    return Rebalance(
        instance=instance,
        at=at,
        stage_seconds=tuple(stage),
        commit_seconds=commit,
        times=ModelTimes(after.cost),
    )


def expert_bytes(model: ModelSpec, dtype: str) -> float:
    """Of one expert's weights in a layer: gate, up and down."""
    return 3 * model.hidden * model.moe.intermediate * value_bytes(dtype)


def _of_layer(moves: MigrationPlan, layer: int) -> MigrationPlan:
    mine = moves.layer_M == layer
    names = ("layer_M", "slot_M", "source_M", "expert_M", "link_M")
    return replace(moves, **{name: getattr(moves, name)[mine] for name in names})
