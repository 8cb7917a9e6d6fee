"""Thinker: what the solver of an instance knows and answers, wherever it runs. Pure: no process, no clock.

Owns questions and answers, and that windows, policy and placements meet here only. L MoE layers, E experts,
S slots.
"""

from typing import Literal

import msgspec
import numpy as np

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.policy import Decision, RebalancePolicy
from moe_runtime.eplb.solve import solve
from moe_runtime.eplb.window import LoadWindow
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.stages import starts_by_slot
from moe_runtime.placement.topology import Topology


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What to do after a window.

    pairs             float64 [L, E]: counts of the window; empty: no window ended
    slots, starts     the placement in use: int32 and uint16 [L, S]
    to_fill           slots that a plan may fill, S less the surplus ones
    force             move to the best placement for the loads so far, whether it pays or not
    nodes             that the ranks sit on, as many on each
    groups            of experts, of which nodes should hold whole ones; 1: experts have none
    """

    pairs: bytes
    num_layers: int
    num_experts: int
    num_ranks: int
    epoch: int
    slots: bytes
    starts: bytes
    to_fill: int
    seconds_per_pair: float
    seconds_per_byte: float
    expert_bytes: int
    horizon_windows: float
    min_gain: float
    force: bool
    nodes: int = 1
    groups: int = 1

    def placement(self) -> Placement:
        shape = self.num_layers, -1
        return Placement(
            slot_to_expert_LS=np.frombuffer(self.slots, np.int32).reshape(shape),
            num_experts=self.num_experts,
            num_ranks=self.num_ranks,
            epoch=self.epoch,
            cumulative_LS=np.frombuffer(self.starts, np.uint16).reshape(shape),
        )


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A decision; arrays as in NewPlacement, empty unless there is something to do.

    `error` says why there is none; `ended`: because the process is gone.

    balancedness, bound, gap  means over the layers: predicted, the most that is possible, the plan's distance
    """

    action: Literal["wait", "resplit", "move"] = "wait"
    why: str = ""
    error: str = ""
    ended: bool = False
    slots: bytes = b""
    starts: bytes = b""
    moves: bytes = b""
    balancedness: float | None = None
    bound: float | None = None
    gap: float | None = None


class Thinker:
    """The window of one instance, and what follows from it."""

    def __init__(self) -> None:
        self.window: LoadWindow | None = None

    def think(self, question: Question) -> Answer:
        """The answer to a question; a window that cannot be is left out, and said to be."""
        current = question.placement()
        if self.window is None:
            self.window = LoadWindow.empty(question.num_layers, question.num_experts)
        try:
            if question.pairs:
                pairs = np.frombuffer(question.pairs, np.float64)
                self.window = self.window.observe(pairs.reshape(question.num_layers, question.num_experts))
            decision = self._decide(question, self.window, current)
        except BalanceError as error:
            return Answer(error=str(error))
        return _answer(decision)

    def _decide(self, question: Question, window: LoadWindow, current: Placement) -> Decision:
        cost = question.seconds_per_byte
        nodes, ranks = question.nodes, question.num_ranks
        topology = Topology(nodes=nodes, ranks_per_node=ranks // nodes, seconds_per_byte=(cost, cost, cost))
        if question.force and window.windows:
            solution = solve(
                window.load_LE,
                topology,
                question.to_fill,
                groups=question.groups,
                current=current,
                expert_bytes=float(question.expert_bytes),
            )
            return Decision(action="move", solution=solution, why="asked for")
        policy = RebalancePolicy(
            topology=topology,
            slots=question.to_fill,
            seconds_per_pair=question.seconds_per_pair,
            expert_bytes=float(question.expert_bytes),
            horizon_windows=question.horizon_windows,
            min_gain=question.min_gain,
            groups=question.groups,
        )
        return policy.decide(window, current)


def _answer(decision: Decision) -> Answer:
    solution = decision.solution
    if solution is None:
        return Answer(why=decision.why)
    plan, target = solution.moves, solution.placement
    assert plan is not None
    act = decision.action != "wait"
    bounded = solution.bound_L > 0
    best_L = np.where(bounded, solution.mean_L / np.where(bounded, solution.bound_L, 1), 1.0)
    return Answer(
        action=decision.action,
        why=decision.why,
        slots=target.slot_to_expert_LS.tobytes() if act else b"",
        starts=starts_by_slot(target).tobytes() if act else b"",
        moves=np.stack([plan.layer_M, plan.slot_M, plan.source_M]).tobytes() if act else b"",
        balancedness=float(solution.balancedness_L.mean()),
        bound=float(best_L.mean()),
        gap=float(solution.gap_L.mean()),
    )
