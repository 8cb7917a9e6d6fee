"""Cumulative tables of split weights, one per source rank: locality first, the totals kept.

Sending a token to a replica on its own rank, or node, is cheaper. If every source rank took its near replica
always, the near ones of busy ranks would overflow. So the shares of each source are chosen near first, under
the constraint that all sources together still give every replica its share.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.placement import FULL_RANGE, Placement
from moe_runtime.placement.topology import Topology


def near_first(placement: Placement, topology: Topology) -> NDArray[np.uint16]:
    """uint16 [R, L, S]: for each source rank the exclusive starts in the order of `Placement.replicas`.

    Sources are taken to have equal numbers of pairs. Per expert, first each rank that holds a replica
    serves itself, then each node its own ranks, as far as the replica's share reaches; what is left is
    dealt in order. So the mean over sources of each replica's share is what the placement says, exactly
    (but that a replica at the end of a row cannot have less than one 65536th), and all that can stays near.
    """
    start, slots = placement.replicas
    share_LS = placement.share_LS
    R, n = placement.num_ranks, placement.slots_per_rank
    tables = np.repeat(placement.cumulative_csr[None], R, axis=0)
    for layer, expert in np.argwhere(placement.replica_counts > 1):
        entries = slice(start[layer, expert], start[layer, expert + 1])
        mine = slots[layer, entries]
        flow_RC = _route(share_LS[layer, mine], mine.astype(np.int64) // n, topology)
        ends = np.cumsum(flow_RC, axis=1)
        begin = ends - flow_RC
        tables[:, layer, entries] = np.minimum(begin, FULL_RANGE - 1).astype(np.uint16)
    return tables


def _route(share_C: NDArray[np.int64], rank_C: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """int64 [R, C]: units each source sends to each replica; rows sum to FULL_RANGE, columns to R x share.

    Three passes: own rank, own node, anywhere. In the node and last pass, sources and replicas that are
    left are joined in order (the north-west corner rule), which keeps both sums exact.
    """
    R = topology.num_ranks
    need_R = np.full(R, FULL_RANGE, np.int64)
    room_C = share_C * R
    flow = np.zeros((R, len(share_C)), np.int64)
    for c, rank in enumerate(rank_C):
        own = min(int(need_R[rank]), int(room_C[c]))
        flow[rank, c] += own
        need_R[rank] -= own
        room_C[c] -= own
    nodes = topology.node_of(np.arange(R))
    for node in range(topology.nodes):
        _join(flow, need_R, room_C, np.flatnonzero(nodes == node), np.flatnonzero(nodes[rank_C] == node))
    _join(flow, need_R, room_C, np.arange(R), np.arange(len(share_C)))
    return flow


def _join(
    flow: NDArray[np.int64],
    need_R: NDArray[np.int64],
    room_C: NDArray[np.int64],
    sources: NDArray[np.intp],
    replicas: NDArray[np.intp],
) -> None:
    """Send what the sources still need to the room the replicas still have: overlap of two partitions."""
    if not len(sources) or not len(replicas):
        return
    need, room = need_R[sources], room_C[replicas]
    need_end, room_end = np.cumsum(need), np.cumsum(room)
    high = np.minimum(need_end[:, None], room_end)
    low = np.maximum((need_end - need)[:, None], room_end - room)
    sent = np.maximum(high - low, 0)
    flow[np.ix_(sources, replicas)] += sent
    need_R[sources] -= sent.sum(axis=1)
    room_C[replicas] -= sent.sum(axis=0)
