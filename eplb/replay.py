"""Replay windows of load against a planner; every placement is judged on the window after it was made."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.policy import RebalancePolicy
from moe_runtime.eplb.window import LoadWindow
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.topology import Topology

Planner = Callable[[NDArray[np.float64], Placement], Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One entry per window W.

    balancedness_W  mean over layers of mean / peak, in the next window; the last has none (NaN)
    moves_W         slots filled after the window
    bytes_W         of the moves
    """

    balancedness_W: NDArray[np.float64]
    moves_W: NDArray[np.int64]
    bytes_W: NDArray[np.float64]


def replay(
    windows: Iterable[NDArray[np.float64]],
    planner: Planner,
    first: Placement,
    topology: Topology,
    expert_bytes: float = 1.0,
) -> Replay:
    """Show the planner each window in turn; `first` is in place before the first one."""
    placement, balance, moves = first, [], []
    for index, load_LE in enumerate(windows):
        if index:
            balance.append(balancedness(placement, load_LE))
        after = planner(load_LE, placement)
        moves.append(len(plan_migration(placement, after, topology)))
        placement = after
    moves_W = np.array(moves, np.int64)
    return Replay(
        balancedness_W=np.array([*balance, np.nan]),
        moves_W=moves_W,
        bytes_W=moves_W.astype(np.float64) * expert_bytes,
    )


def balancedness(placement: Placement, load_LE: NDArray[np.float64]) -> float:
    """Mean over layers of mean rank load / largest rank load."""
    rank_load = placement.rank_load(load_LE)
    peak = rank_load.max(axis=1)
    ratio = np.where(peak > 0, rank_load.mean(axis=1) / np.where(peak > 0, peak, 1), 1.0)
    return float(ratio.mean())


def policy_planner(policy: RebalancePolicy) -> Planner:
    """The policy with its window, as a planner."""
    window: LoadWindow | None = None

    def plan(load_LE: NDArray[np.float64], current: Placement) -> Placement:
        nonlocal window
        if window is None:
            window = LoadWindow.empty(*load_LE.shape)
        window = window.observe(load_LE)
        solution = policy.decide(window, current).solution
        return current if solution is None else solution.placement

    return plan
