"""Decisions of rank 0: when to move, how good the prediction is, what a sick solver does to serving."""

import time
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from moe_runtime.engine.balancing.controller import SOLVER_SECONDS, Controller, Settings, slot_skew
from moe_runtime.engine.balancing.merge import LoadMerge, MergedWindow
from moe_runtime.engine.balancing.solver import SolverProcess
from moe_runtime.engine.balancing.thinker import Answer, Question, Thinker
from moe_runtime.engine.balancing.wire import NewPlacement
from moe_runtime.placement.placement import Placement, linear

LAYERS, EXPERTS, RANKS = 3, 32, 4
PAIRS = 200_000


@dataclass
class FakeMover:
    """Reaches a target at once, or never."""

    placement: Placement
    reaches: bool = True
    busy: bool = False
    gave_up: list[str] = field(default_factory=list)
    targets: list[NewPlacement] = field(default_factory=list)
    seconds_per_byte: float = 1e-10
    slot_bytes: int = 1000

    def aim(self, message: NewPlacement, now: float) -> None:
        self.targets.append(message)
        if self.reaches:
            self.placement = message.target(self.placement)

    def give_up(self, reason: str) -> None:
        self.gave_up.append(reason)


@dataclass
class InlineSolver:
    """Thinks at once; `block` keeps its answers, `dead` says that the process is gone."""

    thinker: Thinker = field(default_factory=Thinker)
    answers: list[Answer] = field(default_factory=list)
    block: bool = False
    dead: bool = False
    restarts: int = 0
    asked: int = 0

    def ask(self, question: Question) -> None:
        self.asked += 1
        self.answers.append(Answer(ended=True) if self.dead else self.thinker.think(question))

    def answer(self) -> Answer | None:
        return self.answers.pop(0) if self.answers and not self.block else None

    def restart(self) -> None:
        self.restarts += 1
        self.answers, self.block, self.dead, self.thinker = [], False, False, Thinker()

    def close(self) -> None:
        return None


@dataclass
class Bench:
    """A controller with a clock, given windows of a load."""

    solver: InlineSolver = field(default_factory=InlineSolver)
    now: float = 0.0
    window: int = 0
    sent: list[NewPlacement] = field(default_factory=list)

    def __post_init__(self) -> None:
        placement = linear(num_layers=LAYERS, num_experts=EXPERTS, num_ranks=RANKS, redundant_experts=4)
        self.mover = FakeMover(placement)
        self.controller = Controller(
            merge=LoadMerge(RANKS, LAYERS, EXPERTS),
            solver=self.solver,
            settings=Settings(to_fill=EXPERTS + 4, horizon_windows=256.0, min_gain=0.01),
            mover=self.mover,
            send=self.sent.append,
            started=0.0,
        )
        self.random = np.random.default_rng(3)

    def give(self, pairs_LE: NDArray[np.float64]) -> None:
        """A window, and a second."""
        self.controller.observe(
            MergedWindow(
                window=self.window,
                pairs_LE=pairs_LE,  # type: ignore[arg-type]
                balancedness_W=np.array([0.5, 0.9]),
                seconds_per_pair=1e-5,
            )
        )
        self.window += 1
        self.poll()

    def poll(self, seconds: float = 1.0, *, hold: bool = False) -> None:
        for _ in range(2):
            self.controller.poll(self.now, hold=hold)
        self.now += seconds

    def stalled(self) -> bool:
        return self.controller.stalled

    def draw(self, share_E: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.random.multinomial(PAIRS, share_E, size=LAYERS).astype(np.float64)

    def balancedness(self, pairs_LE: NDArray[np.float64]) -> float:
        load_LR = self.mover.placement.rank_load(pairs_LE)
        return float((load_LR.mean(axis=1) / load_LR.max(axis=1)).mean())


FLAT = np.full(EXPERTS, 1 / EXPERTS)
SKEWED = np.where(np.arange(EXPERTS) == 7, 0.25, 0.75 / (EXPERTS - 1))


def test_nothing_is_asked_or_moved_while_experts_must_stay():
    bench = Bench()
    bench.solver.block = True
    bench.give(bench.draw(SKEWED))
    assert bench.solver.asked == 1
    bench.solver.block = False
    bench.poll(hold=True)  # the answer comes, and is not followed
    bench.controller.force()
    bench.poll(hold=True)
    assert (bench.solver.asked, bench.mover.targets, bench.stalled()) == (1, [], False)
    bench.poll()
    assert bench.solver.asked == 2
    assert len(bench.mover.targets) == 1


def test_a_forced_rebalance_that_is_answered_while_experts_must_stay_comes_afterwards():
    bench = Bench()
    bench.give(bench.draw(SKEWED))  # so that there is something to decide from
    targets = len(bench.mover.targets)
    bench.solver.block = True
    bench.controller.force()
    bench.poll()
    bench.solver.block = False
    bench.poll(hold=True)
    assert len(bench.mover.targets) == targets
    bench.poll()
    assert len(bench.mover.targets) == targets + 1


def test_a_balanced_load_moves_nothing():
    """Ten windows with the noise of counting: the share of each expert is the same."""
    bench = Bench()
    # Experts 0..3 have a replica each, which linear placement puts on the last rank: a fair load for it.
    start = bench.mover.placement
    share_E = 1.0 / np.bincount(start.slot_to_expert_LS[0], minlength=EXPERTS)
    fair_E = np.where(np.arange(EXPERTS) < 4, 2.0, 1.0)
    assert share_E.shape == fair_E.shape
    for _ in range(10):
        bench.give(bench.draw(fair_E / fair_E.sum()))
    assert bench.sent == []
    assert bench.controller.newest.action in ("wait", "resplit")
    assert not bench.stalled()


def test_a_skewed_load_is_balanced_as_predicted_and_then_left_alone():
    bench = Bench()
    before = bench.balancedness(bench.draw(SKEWED))
    bench.give(bench.draw(SKEWED))
    assert len(bench.sent) == 1
    predicted = bench.controller.newest.balancedness
    assert predicted is not None
    measured = bench.balancedness(bench.draw(SKEWED))
    assert before < 0.7
    assert measured > 0.95
    assert abs(measured - predicted) <= 0.03
    assert bench.controller.newest.bound is not None
    assert measured <= bench.controller.newest.bound + 0.01
    moved = [m for m in bench.sent if m.moves]
    for _ in range(10):
        bench.give(bench.draw(SKEWED))
    assert [m for m in bench.sent if m.moves] == moved


def test_a_nan_window_is_a_warning_and_the_next_one_is_decided(caplog):
    bench = Bench()
    bad = bench.draw(SKEWED)
    bad[1, 3] = np.nan
    bench.give(bad)
    assert bench.stalled()
    assert "no decision" in caplog.text
    assert bench.sent == []
    bench.give(bench.draw(SKEWED))
    assert not bench.stalled()
    assert len(bench.sent) == 1


def test_a_blocked_solver_is_noticed_within_two_windows_and_replaced(caplog):
    bench = Bench()
    bench.solver.block = True
    bench.give(bench.draw(SKEWED))
    bench.give(bench.draw(SKEWED))
    assert bench.stalled()
    assert "not answered" in caplog.text
    assert bench.sent == []
    bench.poll(SOLVER_SECONDS)
    bench.poll()
    assert bench.solver.restarts == 1
    bench.poll()  # the window that ended meanwhile
    assert not bench.stalled()
    assert len(bench.sent) == 1


def test_a_dead_solver_is_started_anew():
    bench = Bench()
    bench.solver.dead = True
    bench.give(bench.draw(SKEWED))
    assert bench.stalled()
    assert bench.solver.restarts == 1
    bench.give(bench.draw(SKEWED))
    assert not bench.stalled()


def test_windows_that_end_while_experts_move_are_added_up():
    bench = Bench()
    bench.mover.busy = True
    for _ in range(3):
        bench.give(bench.draw(SKEWED))
    assert bench.solver.asked == 0
    bench.mover.busy = False
    bench.poll()
    assert bench.solver.asked == 1
    window = bench.solver.thinker.window
    assert window is not None
    assert window.sum_PLE[-1].sum() == 3 * PAIRS * LAYERS


def test_a_forced_rebalance_moves_though_it_does_not_pay():
    bench = Bench()
    bench.mover.seconds_per_byte = 1.0  # nothing ever pays
    bench.give(bench.draw(SKEWED))
    assert [m for m in bench.sent if m.moves] == []
    bench.controller.force()
    bench.poll()
    assert len([m for m in bench.sent if m.moves]) == 1
    assert bench.mover.gave_up == ["another rebalance was asked for"]
    assert bench.controller.newest.why == "asked for"


def test_slot_skew_is_the_hottest_slot_over_the_mean():
    placement = linear(num_layers=1, num_experts=4, num_ranks=2, redundant_experts=2)
    assert slot_skew(placement, np.array([[8.0, 2.0, 4.0, 4.0]])) == pytest.approx(4 / 3)
    assert slot_skew(placement, np.zeros((1, 4))) == 1.0


def test_the_solver_is_a_process_that_may_be_killed():
    """It answers as a Thinker does; killed, it says so; started anew, it answers again."""
    bench = Bench()
    question = bench.controller.question(bench.draw(SKEWED))
    solver = SolverProcess()
    solver.start()
    solver.ask(question)
    assert solver.answer() is None  # nobody waited
    assert solver.wait(60) == Thinker().think(question)
    assert solver._process is not None
    solver._process.kill()
    solver.ask(question)
    assert solver.wait(10).ended
    solver.restart()
    solver.ask(question)
    assert not solver.wait(60).ended
    solver.close()
    deadline = time.monotonic() + 10
    while solver._process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert solver._process.poll() is not None


def test_the_solver_is_told_of_nodes_and_groups():
    bench = Bench()
    question = bench.controller.question(None)
    assert (question.nodes, question.groups) == (1, 1)
    bench.controller.settings = replace(bench.controller.settings, nodes=2, groups=4)
    question = bench.controller.question(np.ones((LAYERS, EXPERTS)))
    assert (question.nodes, question.groups) == (2, 4)
    assert Thinker().think(question).error == ""
    assert "groups" in Thinker().think(msgspec.structs.replace(question, groups=3)).error
