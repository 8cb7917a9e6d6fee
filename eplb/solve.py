"""The balancer: loads in, placement out, with a proven bound. Pure; the same input gives the same bytes.

L layers, E experts, R ranks of N slots, S slots to be filled. See docs/eplb.md for the method.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_runtime.eplb.bound import REASONS, Bound, lower_bound
from moe_runtime.eplb.checks import check_settings, check_sizes
from moe_runtime.eplb.effort import EFFORTS, Effort
from moe_runtime.eplb.loads import check_load, from_units, to_units
from moe_runtime.eplb.movement import Roads, cheapest
from moe_runtime.eplb.replicate import replica_counts
from moe_runtime.eplb.scratch import make_plan, node_by_node
from moe_runtime.eplb.search import peak_rounds
from moe_runtime.eplb.solution import Solution
from moe_runtime.eplb.split import cumulative_table, level_shares
from moe_runtime.eplb.state import State
from moe_runtime.eplb.trade import Trade
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import Placement, count_experts
from moe_runtime.placement.stages import starts_by_slot
from moe_runtime.placement.topology import Topology

ROUNDING = 1 - 1e-12  # loads are rounded to units; the bound stays on the safe side of that
NODE_TOLERANCE = 0.01  # node by node is taken where its peak is at most this part above the global plan's


def solve(
    load_LE: ArrayLike,
    topology: Topology,
    slots: int,
    *,
    groups: int = 1,
    current: Placement | None = None,
    horizon: float | None = None,
    expert_bytes: float = 1.0,
    uncertainty: ArrayLike = 0.0,
    min_gain: float = 0.0,
    next_error: float = 0.0,
    quality: Literal["default", "best"] = "default",
    split: Literal["weighted", "equal"] = "weighted",
    effort: Effort | None = None,
    fill: bool = False,
) -> Solution:
    """Place E experts, the hot ones several times, on at most `slots` slots of all ranks together.

    load_LE   [L, E]: any measure of each expert's work, finite and >= 0
    slots     S >= E; every rank has ceil(S / R), surplus ones stay empty (-1)
    groups    expert groups of group-limited routing: where whole groups on a node cost at most 1 % of
              the peak, a layer is planned node by node, which keeps traffic on fewer nodes
    current   the placement in use: moves from it are weighed against balance
    horizon   seconds that one unit of load on the heaviest rank of a layer costs until the next
              decision; None: reach the balance of a new plan, with as few moves as that takes
    expert_bytes  of one expert's weights in a layer; with the topology's links the price of a move
    split     "weighted": replicas may carry unequal shares; "equal": the placement says nothing of them
    uncertainty   relative standard error of the loads, [L] or one number. New plans and split weights fit
              the errors too, so a layer keeps its slots unless a new plan would lower its peak by more than
              such errors feign, and with its slots its split weights unless others would
    min_gain  and by this part of the new peak on top
    next_error  relative standard error of an expert's load in the windows to come. With a horizon, the peak
              that is weighed against moves, and levelled, is the one to be expected (see `expected`)
    effort    instead of `quality`
    fill      leave no slot empty even if an expert then has more replicas than there are ranks

    No expert sits twice on a rank unless it has more replicas than ranks. Ties are broken by index.
    Raises BalanceError for loads or sizes that cannot be.
    """
    load = check_load(load_LE)
    work = EFFORTS.get(quality) if effort is None else effort
    check_sizes(load, topology, slots, groups, current)
    check_settings(horizon, expert_bytes, uncertainty, min_gain, next_error, quality, split, len(load))
    assert work is not None
    task = _Task(load, topology, slots, work, split == "weighted", fill)
    state = task.from_nothing()
    by_node_L = task.take_nodes(state, groups) if groups > 1 else np.zeros(len(load), bool)
    if current is None:
        return task.answer(state, by_node_L, current, horizon, expert_bytes, np.ones(len(load)))
    feigned_L = task.feigned(state, uncertainty, min_gain)
    stay_L = state.peak_L * feigned_L
    state, by_node_L = task.from_current(state, by_node_L, current, horizon, expert_bytes, stay_L, next_error)
    return task.answer(state, by_node_L, current, horizon, expert_bytes, feigned_L)


class _Task:
    """One call of `solve`: the sizes and the loads in units."""

    def __init__(
        self,
        load: NDArray[np.float64],
        topology: Topology,
        slots: int,
        effort: Effort,
        weighted: bool,
        fill: bool,
    ) -> None:
        self.load, self.topology, self.slots = load, topology, slots
        self.effort, self.weighted = effort, weighted
        self.units, self.scale_L = to_units(load)
        self.E, self.R = load.shape[1], topology.num_ranks
        self.N = topology.slots_per_rank(slots)
        count_LE = replica_counts(self.units, slots, self.R)
        self.least_share_L = np.floor(self.units / count_LE).max(axis=1)
        overfull = fill and slots > self.E * self.R
        self.count_LE = replica_counts(self.units, slots, slots) if overfull else count_LE
        self.simple_L = np.maximum(np.floor(self.units.sum(axis=1) / self.R), self.least_share_L)
        self.goal_L = self.simple_L * (1 + effort.tolerance)

    def from_nothing(self) -> State:
        state = make_plan(
            self.units,
            self.count_LE,
            self.goal_L,
            self.effort,
            ranks=self.R,
            slots_per_rank=self.N,
        )
        if self.weighted:
            self._weigh(state)
        return state

    def _weigh(self, state: State) -> None:
        """Level the shares; with effort left, swap on, keeping what lowers the peak."""
        level_shares(state, self.goal_L, self.effort.sweeps)
        for _ in range(self.effort.weighted_rounds):
            layers = np.flatnonzero(state.peak_L > self.goal_L)
            if not len(layers):
                return
            other = state.take(layers)
            peak_rounds(other, self.goal_L[layers], self.effort.peak_rounds)
            level_shares(other, self.goal_L[layers], self.effort.sweeps)
            lower = np.flatnonzero(other.peak_L < state.peak_L[layers])
            state.put(layers[lower], other.take(lower))

    def take_nodes(self, state: State, groups: int) -> NDArray[np.bool_]:
        """Replace layers by plans made node by node where those are nearly as good; says where."""
        by_node_L = np.zeros(len(self.load), bool)
        nodes = self.topology.nodes
        if nodes == 1 or groups % nodes or self.slots % nodes:
            return by_node_L
        if self.slots // nodes > self.E // nodes * self.topology.ranks_per_node:
            return by_node_L
        layers, other = node_by_node(
            self.units,
            state.peak_L * (1 + NODE_TOLERANCE),
            self.effort,
            groups=groups,
            nodes=nodes,
            ranks_per_node=self.topology.ranks_per_node,
            slots_per_rank=self.N,
            slots=self.slots,
        )
        if other is not None:
            if self.weighted:
                level_shares(other, self.goal_L[layers], self.effort.sweeps)
            state.put(layers, other)
            by_node_L[layers] = True
        return by_node_L

    def feigned(self, fresh: State, uncertainty: ArrayLike, min_gain: float) -> NDArray[np.float64]:
        """float64 [L]: up to so many times what it could be, the peak of the current placement is left alone.

        The largest of R rank loads with independent relative errors s exceeds their mean by about
        s sqrt(2 ln R); errors of the slots of a rank partly cancel.
        """
        square = np.square(fresh.share_LRN / np.maximum(fresh.load_LR, 1)[:, :, None]).sum(axis=2)
        rank_error_L = np.asarray(uncertainty, np.float64) * np.sqrt(square).mean(axis=1)
        feigned_L: NDArray[np.float64] = 1 + rank_error_L * np.sqrt(2 * np.log(max(self.R, 2))) + min_gain
        return feigned_L

    def from_current(
        self,
        fresh: State,
        by_node_L: NDArray[np.bool_],
        current: Placement,
        horizon: float | None,
        expert_bytes: float,
        stay_L: NDArray[np.float64],
        error: float,
    ) -> tuple[State, NDArray[np.bool_]]:
        """The cheapest plan from `current`; and the layers in which nodes hold whole groups."""
        if horizon is None:  # any move is worth a smaller peak, until the peak of the fresh plan is reached
            slowest = self.topology.seconds_per_byte[2] * expert_bytes * self.slots
            price_L = 1e6 * max(slowest, 1e-300) / self.simple_L
            floor_L = np.maximum(fresh.peak_L, self.goal_L)
        else:
            price_L = np.ldexp(horizon, -self.scale_L)
            floor_L = np.zeros(len(self.load))
        trade = Trade(
            topology=self.topology,
            price_L=price_L,
            floor_L=floor_L,
            expert_bytes=expert_bytes,
            error=0.0 if horizon is None else error,
        )
        roads = Roads(
            trade=trade,
            table_LRN=current.slot_to_expert_LS.astype(np.int64).reshape(len(self.load), self.R, self.N),
            goal_L=self.goal_L,
            stay_L=stay_L,
            whole_nodes_L=by_node_L,
            effort=self.effort,
            slots=self.slots,
            weighted=self.weighted,
        )
        return cheapest(roads, fresh)

    def answer(
        self,
        state: State,
        by_node_L: NDArray[np.bool_],
        current: Placement | None,
        horizon: float | None,
        expert_bytes: float,
        feigned_L: NDArray[np.float64],
    ) -> Solution:
        bound = self._bound(state)
        L = len(self.load)
        slots_LS = state.expert_LRN.reshape(L, -1).astype(np.int32)
        epoch = 0 if current is None else current.epoch + 1
        equal_L = peak_L = equal_peak(slots_LS, self.load, self.R)
        before_L = None if current is None else current.rank_load(self.load).max(axis=1)
        starts_LS = None
        if self.weighted:
            starts_LS, part_LS = cumulative_table(slots_LS, state.share_LRN.reshape(L, -1), self.E)
            peak_L = _peak(slots_LS, self.load, part_LS, self.R)
            idle = np.flatnonzero(peak_L >= equal_L)  # weights gain nothing but their rounding: share equally
            if len(idle):
                nothing = np.zeros((len(idle), slots_LS.shape[1]))
                starts_LS[idle], _ = cumulative_table(slots_LS[idle], nothing, self.E)
            peak_L = np.minimum(peak_L, equal_L)
            if current is not None and before_L is not None:
                same_L = (slots_LS == current.slot_to_expert_LS).all(axis=1)
                kept = np.flatnonzero(same_L & (before_L <= peak_L * feigned_L))
                starts_LS[kept], peak_L[kept] = starts_by_slot(current)[kept], before_L[kept]
        placement = Placement(
            slot_to_expert_LS=slots_LS,
            num_experts=self.E,
            num_ranks=self.R,
            epoch=epoch,
            cumulative_LS=starts_LS,
            topology=self.topology,
        )
        mean_L = self.load.sum(axis=1) / self.R
        saved = np.nan if before_L is None or horizon is None else horizon * float((before_L - peak_L).sum())
        return Solution(
            placement=placement,
            peak_L=peak_L,
            peak_equal_L=equal_L,
            mean_L=mean_L,
            bound_L=np.minimum(from_units(bound.units_L * ROUNDING, self.scale_L), peak_L),
            reason_L=tuple(REASONS[r] for r in bound.reason_L),
            node_by_node_L=by_node_L,
            moves=None
            if current is None
            else plan_migration(current, placement, self.topology, expert_bytes),
            before_L=before_L,
            saved_seconds=saved,
        )

    def _bound(self, state: State) -> Bound:
        return lower_bound(
            self.units,
            self.least_share_L,
            state.peak_L,
            ranks=self.R,
            slots_per_rank=self.N,
            slots=self.slots,
            steps=self.effort.bound_steps,
            tolerance=self.effort.tolerance,
        )


def equal_peak(slots_LS: NDArray[np.int32], load_LE: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """float64 [L]: the largest rank load if the replicas of an expert share equally."""
    L, E = load_LE.shape
    share_LE = load_LE / np.maximum(count_experts(slots_LS, E), 1)
    return _peak(slots_LS, share_LE, np.ones((L, 1)), ranks)


def _peak(
    slots_LS: NDArray[np.int32], load_LE: NDArray[np.float64], part_LS: NDArray[np.float64], ranks: int
) -> NDArray[np.float64]:
    """float64 [L]: the largest rank load if each slot carries that part of its expert's load."""
    padded = np.concatenate([load_LE, np.zeros((len(load_LE), 1))], axis=1)  # index -1 (empty) is the padding
    carried = np.take_along_axis(padded, slots_LS, axis=1) * part_LS
    peak: NDArray[np.float64] = carried.reshape(len(load_LE), ranks, -1).sum(axis=2).max(axis=1)
    return peak
