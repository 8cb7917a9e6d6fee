"""Give the current plan the replica counts of a new one, with as few changes as that takes.

Swaps of slots then find partners for them; with two slots a rank those alone reach the best peak of the
counts.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.state import State


def adopt_counts(current: State, fresh: State) -> State:
    """A plan of the same layers with the counts of `fresh` where its replicas find room, equally split.

    Surplus replicas leave the heaviest ranks; the new ones, heaviest first, take the freed and empty slots of
    the lightest ranks.
    """
    table = current.expert_LRN.copy()
    share_LE = np.floor(fresh.units_LE / np.maximum(fresh.count_LE, 1))
    for layer in range(len(table)):
        _adopt(table[layer], share_LE[layer], fresh.count_LE[layer], current.count_LE[layer])
    return State.of(table, current.units_LE)


def _adopt(
    table_RN: NDArray[np.int64],
    share_E: NDArray[np.float64],
    count_E: NDArray[np.int64],
    current_E: NDArray[np.int64],
) -> None:
    """One layer, in place."""
    wanted_E = count_E - current_E
    load_R = np.where(table_RN >= 0, share_E[np.maximum(table_RN, 0)], 0.0).sum(axis=1)
    for expert in np.flatnonzero(wanted_E < 0).tolist():
        for _ in range(-int(wanted_E[expert])):
            ranks, slots = np.nonzero(table_RN == expert)
            k = load_R[ranks].argmax()
            table_RN[ranks[k], slots[k]] = -1
            load_R[ranks[k]] -= share_E[expert]
    more = np.repeat(np.arange(len(wanted_E)), np.maximum(wanted_E, 0))
    for expert in more[np.argsort(-share_E[more], kind="stable")].tolist():
        empty_R = (table_RN < 0).any(axis=1) & ~(table_RN == expert).any(axis=1)
        if not empty_R.any():
            continue
        rank = int(np.where(empty_R, load_R, np.inf).argmin())
        table_RN[rank, int((table_RN[rank] < 0).argmax())] = expert
        load_R[rank] += share_E[expert]
