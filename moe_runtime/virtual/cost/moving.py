"""Moving: seconds to move experts between devices. A pure function of bytes and links.

Knows nothing of other copies at the same time.
"""

from collections import defaultdict

from moe_runtime.placement.migration import MigrationPlan
from moe_runtime.placement.topology import LINK_CLASSES
from moe_runtime.virtual.cost.links import Links


def rebalance_seconds(links: Links, plan: MigrationPlan, slots_per_rank: int) -> float:
    """A migration beside serving: every rank sends and receives its experts one after the other, all at once.

    Copies within a rank are free; within a node they use the scale-up links, else the network.
    """
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    moves = zip(plan.link_M.tolist(), plan.slot_M.tolist(), plan.source_M.tolist(), strict=True)
    for link, slot, source in moves:
        if LINK_CLASSES[link] == "same_rank":
            continue
        seconds = links.bulk(plan.expert_bytes, local=LINK_CLASSES[link] == "same_node")
        busy["in", slot // slots_per_rank] += seconds
        busy["out", source // slots_per_rank] += seconds
    return max(busy.values(), default=0.0)
