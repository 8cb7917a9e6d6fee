"""Rename the ranks and slots of a new plan so that it overlaps with the current one.

Ranks are alike, so a plan is as good under any renaming of them; the one kept moves least. Nodes are
matched first (by what their ranks have in common in all), then ranks inside matched nodes.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.topology import Topology


def rename(
    new_LRN: NDArray[np.int64],
    current_LRN: NDArray[np.int64],
    topology: Topology,
    num_experts: int,
    whole_nodes_L: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """The new table with ranks, and slots in them, ordered to keep experts where they are.

    whole_nodes_L  layers planned node by node: the ranks of a node stay together
    """
    out = np.empty_like(new_LRN)
    for layer in range(len(new_LRN)):
        shared_RR = _has(new_LRN[layer], num_experts) @ _has(current_LRN[layer], num_experts).T
        rank_of = _match_by_node(shared_RR, topology) if whole_nodes_L[layer] else _match(shared_RR)
        for new, old in enumerate(rank_of):
            out[layer, old] = _keep_slots(new_LRN[layer, new], current_LRN[layer, old])
    return out


def _has(table_RN: NDArray[np.int64], num_experts: int) -> NDArray[np.float32]:
    """[R, E]: how often a rank has an expert."""
    has = np.zeros((len(table_RN), num_experts + 1), np.float32)
    np.add.at(has, (np.arange(len(table_RN))[:, None], table_RN), 1)
    return has[:, :num_experts]


def _match(shared_RR: NDArray[np.float32]) -> NDArray[np.int64]:
    """The current rank each new rank becomes: largest overlap first, ties by index."""
    R = len(shared_RR)
    new_M, old_M = np.nonzero(shared_RR)
    order = np.argsort(-shared_RR[new_M, old_M], kind="stable")
    rank_of, taken = np.full(R, -1, np.int64), np.zeros(R, bool)
    for new, old in zip(new_M[order].tolist(), old_M[order].tolist(), strict=True):
        if rank_of[new] < 0 and not taken[old]:
            rank_of[new], taken[old] = old, True
    rank_of[rank_of < 0] = np.flatnonzero(~taken)
    return rank_of


def _match_by_node(shared_RR: NDArray[np.float32], topology: Topology) -> NDArray[np.int64]:
    """As `_match`, but nodes first, then the ranks inside matched nodes."""
    nodes, g = topology.nodes, topology.ranks_per_node
    blocks = shared_RR.reshape(nodes, g, nodes, g)
    rank_of = np.empty(nodes * g, np.int64)
    for new, old in enumerate(_match(blocks.sum(axis=(1, 3)))):
        rank_of[new * g : (new + 1) * g] = old * g + _match(blocks[new, :, old])
    return rank_of


def _keep_slots(new_N: NDArray[np.int64], current_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same experts as `new_N`, those that are in `current_N` in the slot they have there."""
    out = np.full(len(new_N), -2, np.int64)
    left = new_N.tolist()
    for slot, expert in enumerate(current_N.tolist()):
        if expert in left:
            out[slot] = expert
            left.remove(expert)
    out[out == -2] = left
    return out
