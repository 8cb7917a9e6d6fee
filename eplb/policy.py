"""RebalancePolicy: when to move experts, and which. Pure: no clock, no process group, no state of its own."""

from dataclasses import dataclass
from typing import Literal

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.solution import Solution
from moe_runtime.eplb.solve import solve
from moe_runtime.eplb.window import LoadWindow
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now.

    action    "wait": keep the placement; "resplit": same slots, new split weights, nothing moves;
              "move": fill the slots of `solution.moves`
    solution  what was solved; None if there was nothing to go by
    why       in words, for the log
    """

    action: Literal["wait", "resplit", "move"]
    solution: Solution | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePolicy:
    """Moves only what pays: the predicted saving over the horizon has to exceed the cost of moving.

    seconds_per_pair  what one more pair on the heaviest rank of a layer costs a window
    horizon_windows   windows over which a better placement is expected to pay, while the load is steady
    drift_windows     the same while it drifts: what is gained is lost again soon
    tight_windows     the same while it drifts and a rank has at most two slots: a swap then changes half of
                      what two ranks carry, and lasts longer than a close fit of many
    expert_bytes      of one expert's weights in a layer
    hysteresis        the saving must exceed the cost this many times
    min_gain          of a steady load: a layer's peak has to fall by more than this part, or the layer stays
    least_error       relative error of steady loads that is assumed at least: a plan made from one window
                      with such noise is not touched when later windows average it out

    While the load drifts, the expected peak of the next window is priced instead: by the error of the
    predictions so far.
    """

    topology: Topology
    slots: int
    seconds_per_pair: float
    expert_bytes: float
    horizon_windows: float = 256.0
    drift_windows: float = 3.0
    tight_windows: float = 5.5
    hysteresis: float = 2.0
    min_gain: float = 0.01
    least_error: float = 0.065
    groups: int = 1
    split: Literal["weighted", "equal"] = "weighted"
    quality: Literal["default", "best"] = "default"

    def __post_init__(self) -> None:
        for name in (
            "seconds_per_pair",
            "expert_bytes",
            "horizon_windows",
            "drift_windows",
            "tight_windows",
            "min_gain",
            "least_error",
        ):
            if not getattr(self, name) >= 0:
                raise BalanceError(f"{name} = {getattr(self, name)}: must be a number >= 0")
        if not self.hysteresis >= 1:
            raise BalanceError(f"hysteresis = {self.hysteresis}: must be at least 1")

    def decide(self, window: LoadWindow, current: Placement) -> Decision:
        """Decide after a window has been observed. Every rank with the same window decides the same."""
        if window.windows == 0:
            return Decision(action="wait", solution=None, why="no load has been seen")
        steady = window.steady
        tight = self.topology.slots_per_rank(self.slots) <= 2
        drift_windows = self.tight_windows if tight else self.drift_windows
        windows = self.horizon_windows if steady else drift_windows
        horizon = self.seconds_per_pair * windows
        solution = solve(
            window.load_LE,
            self.topology,
            self.slots,
            groups=self.groups,
            current=current,
            horizon=horizon / self.hysteresis,
            expert_bytes=self.expert_bytes,
            uncertainty=max(window.estimate_error, self.least_error) if steady else 0.0,
            min_gain=self.min_gain if steady else 0.0,
            next_error=0.0 if steady else window.uncertainty,
            quality=self.quality,
            split=self.split,
        )
        assert solution.moves is not None
        assert solution.before_L is not None
        saved = horizon * float((solution.before_L - solution.peak_L).sum())
        if len(solution.moves):
            moves, layers = len(solution.moves), int((solution.moves.moves_L > 0).sum())
            why = (
                f"{moves} move{'s' * (moves > 1)} in {layers} layer{'s' * (layers > 1)}:"
                f" {solution.move_seconds:.3g} s of copies save {saved:.3g} s over {windows:g} windows"
            )
            return Decision(action="move", solution=solution, why=why)
        if solution.placement.cumulative_csr.tobytes() != current.cumulative_csr.tobytes():
            return Decision(action="resplit", solution=solution, why=f"new split weights save {saved:.3g} s")
        return Decision(action="wait", solution=solution, why="nothing pays")
