"""Moving: seconds to move KV, weights and experts between devices. Pure functions of bytes and links.

Owns what is copied outside of steps. Who copies at the same time is the caller's to know: `sharing` is the
number of copies on the busiest of the links a copy uses.
"""

from collections import defaultdict

from moe_runtime.errors import InputError
from moe_runtime.placement.migration import MigrationPlan
from moe_runtime.placement.topology import LINK_CLASSES
from moe_runtime.virtual.cost.links import Links


def kv_seconds(links: Links, token_bytes: float, tokens: int, *, sharing: float = 1.0) -> float:
    """A sequence's KV from a prefill rank to a decode rank; `token_bytes` of all layers, see `KVSpec`."""
    return links.bulk(token_bytes * tokens, sharing)


def kv_exposed_seconds(
    links: Links, token_bytes: float, tokens: int, last_chunk: int, *, sharing: float = 1.0
) -> float:
    """What is left of the copy after the last chunk; earlier ones travel beside the computation."""
    return kv_seconds(links, token_bytes, min(tokens, last_chunk), sharing=sharing)


def load_seconds(rank_bytes: float, storage_bandwidth: float, *, sharing: float = 1.0) -> float:
    """A rank's weights from storage of `storage_bandwidth` bytes/s that `sharing` ranks read together."""
    if storage_bandwidth <= 0:
        raise InputError(f"storage_bandwidth = {storage_bandwidth}: must be above 0")
    return rank_bytes * max(sharing, 1.0) / storage_bandwidth


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
