"""Reloads and rebalances of several ranks in one process: which goes first, and what a failure leaves."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_runtime.engine.agree import MoveOrder
from moe_runtime.engine.balancing.agent import Balancing
from moe_runtime.engine.balancing.desk import ExpertDesk
from moe_runtime.engine.balancing.load import ExpertLoad, WindowMeter
from moe_runtime.engine.balancing.reload import Reloader
from moe_runtime.engine.balancing.wire import FinishReload, NewPlacement, Reload, ReloadAnswer
from moe_runtime.errors import CheckpointError
from moe_runtime.placement.placement import Placement
from tests.engine.balancing.live import moves, rearranged
from tests.engine.balancing.test_mover import EXPERTS, LAYERS, RANKS, Ranks

OLD, NEW, LATER = 1 << 60, (1 << 60) + 1, (1 << 60) + 2


@dataclass
class Desks:
    """A rank's weights are a number; `values` are those of checkpoints; `damaged` ranks cannot read."""

    ranks: Ranks = field(default_factory=Ranks)
    values: dict[str, float] = field(default_factory=lambda: {"new": 2.0, "later": 3.0, "endless": 4.0})
    damaged: set[int] = field(default_factory=set)
    may_read: threading.Event = field(default_factory=threading.Event)
    read_for: list[Placement] = field(default_factory=list)
    answers: list[ReloadAnswer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_read.set()
        self.weights = [{"w": torch.ones(3)} for _ in range(RANKS)]
        self.desks = [self._desk(rank) for rank in range(RANKS)]

    def _desk(self, rank: int) -> ExpertDesk:
        def read(path: Path, placement: Placement, wanted: Callable[[], bool]) -> Mapping[str, Tensor]:
            self.may_read.wait(10)
            while path.name == "endless" and wanted():
                time.sleep(0.001)
            self.read_for.append(placement)
            if rank in self.damaged:
                raise CheckpointError("tensor w: cannot be read")
            return {"w": torch.full((3,), self.values[path.name])}

        mover = self.ranks.movers[rank]
        load = ExpertLoad(LAYERS, EXPERTS, torch.device("cpu"))
        return ExpertDesk(
            instance="unified-0",
            deployment="unified",
            rank=rank,
            layers=tuple(range(LAYERS)),
            load=load,
            placement=mover.placement,
            reload=Reloader("unified-0", rank, self.weights[rank], read),
            balancing=Balancing(
                instance="unified-0",
                mover=mover,
                meter=WindowMeter(load, rank=rank, interval_tokens=1 << 40),
                send=lambda rank, message: None,
            ),
        )

    def tell(self, message: Reload | FinishReload, ranks: range = range(RANKS)) -> None:
        for rank in ranks:
            assert self.desks[rank].handle(message) == []

    def prepare(self, version: int, name: str = "new", ranks: range = range(RANKS)) -> None:
        self.tell(Reload(frontend=0, version=version, path=name), ranks)

    def move(self, ranks: range = range(RANKS)) -> None:
        """Send ranks to another placement."""
        current = self.ranks.movers[0].placement
        target = rearranged(current, "permute", np.random.default_rng(1))
        message = NewPlacement.of(1, current, target, moves(current, target))
        for rank in ranks:
            self.desks[rank].handle(message)

    def step(self) -> MoveOrder:
        for desk in self.desks:
            self.answers += [answer for _, answer in desk.poll(0.0) if isinstance(answer, ReloadAnswer)]
        return self.ranks.step(self.desks)

    def until(self, *states: str) -> None:
        """Step until every rank's newest answer is one of these."""
        for _ in range(5000):
            newest = {a.rank: a.state for a in self.answers}
            if len(newest) == RANKS and set(newest.values()) <= set(states):
                return
            self.step()
        raise AssertionError(self.answers)

    @property
    def in_use(self) -> list[float]:
        return [float(w["w"][0]) for w in self.weights]


def test_experts_on_the_move_go_first_and_none_begins_until_the_weights_have_changed():
    world = Desks()
    addresses = [w["w"].data_ptr() for w in world.weights]
    world.move()
    world.prepare(NEW)
    world.until("staged")
    assert world.ranks.movers[0].placement.epoch == LAYERS  # all of the move
    assert {p.digest for p in world.read_for} == {world.ranks.movers[0].placement.digest}
    begins = [o.begin for o in world.ranks.orders if o.begin]
    assert begins[-1] == NEW
    assert len(begins) == LAYERS + 1
    assert world.in_use == [1.0] * RANKS
    world.tell(FinishReload(version=NEW, commit=True), range(RANKS - 1))
    for _ in range(5):
        assert world.step() == MoveOrder(moving=True)  # one rank has not heard of it
    world.tell(FinishReload(version=NEW, commit=True), range(RANKS - 1, RANKS))
    world.until("in use")
    assert world.in_use == [2.0] * RANKS
    assert [w["w"].data_ptr() for w in world.weights] == addresses
    assert [d.reload.version for d in world.desks] == [NEW] * RANKS


def test_one_rank_that_cannot_read_has_all_drop_it_and_the_next_reload_works():
    world = Desks(damaged={2})
    world.prepare(NEW)
    world.until("failed")
    assert world.in_use == [1.0] * RANKS
    last = {a.rank: a.why for a in world.answers}
    assert last == {0: "", 1: "", 2: "tensor w: cannot be read", 3: ""}
    assert not any(d.busy or d.reload.pending for d in world.desks)
    world.damaged.clear()
    world.answers.clear()
    world.prepare(LATER, "later")
    world.until("staged")
    world.tell(FinishReload(version=LATER, commit=True))
    world.until("in use")
    assert world.in_use == [3.0] * RANKS


def test_a_frontend_that_gives_up_leaves_the_old_weights_and_only_one_is_heard_at_a_time():
    world = Desks()
    world.may_read.clear()
    world.prepare(NEW)
    assert world.step().begin == NEW
    for _ in range(5):
        assert world.step() == MoveOrder()  # nobody is kept awake while files are read
    world.prepare(LATER, "later", range(1))
    world.step()
    (refused,) = world.answers
    assert (refused.version, refused.state) == (LATER, "failed")
    assert "another reload" in refused.why
    world.tell(FinishReload(version=LATER, commit=False))  # nobody's
    world.tell(FinishReload(version=NEW, commit=False, why="it takes too long"), range(1))
    world.answers.clear()
    world.until("failed")
    world.may_read.set()
    assert world.in_use == [1.0] * RANKS
    assert [a.why for a in world.answers] == ["it takes too long", "", "", ""]


def test_the_next_reload_waits_for_the_thread_of_the_one_that_was_dropped():
    """So that no rank ever holds three sets of weights."""
    world = Desks()
    world.may_read.clear()
    world.prepare(NEW)
    assert world.step().begin == NEW
    world.tell(FinishReload(version=NEW, commit=False))
    world.until("failed")
    world.answers.clear()
    world.prepare(LATER, "later")
    for _ in range(5):
        assert world.step() == MoveOrder()
        assert not any(d.busy for d in world.desks)  # nobody is kept awake meanwhile
        assert all(d.patience < 1 for d in world.desks)
    world.may_read.set()
    world.until("staged")
    world.tell(FinishReload(version=LATER, commit=True))
    world.until("in use")
    assert world.in_use == [3.0] * RANKS


def test_a_target_that_comes_late_does_not_stop_a_reload_that_has_begun():
    """The other ranks have dropped it, or the reload would not have begun."""
    world = Desks()
    world.prepare(NEW)
    world.step()
    world.move(range(1))
    world.until("staged")
    world.tell(FinishReload(version=NEW, commit=True))
    world.until("in use")
    assert world.in_use == [2.0] * RANKS


def test_reading_ends_soon_after_nobody_wants_it_and_before_a_rank_does():
    """A thread that is still at work when the process exits would abort it."""
    world = Desks()
    world.prepare(NEW, "endless")
    world.step()
    world.tell(FinishReload(version=NEW, commit=False))
    world.until("failed")
    world.answers.clear()
    world.prepare(LATER, "endless")
    for _ in range(5000):
        if world.step().begin == LATER:
            break
    assert all(d.reload.begun for d in world.desks)
    for desk in world.desks:
        desk.close()
    assert not [t for t in threading.enumerate() if t.name == "reload"]


def test_two_reloads_that_meet_are_both_dropped():
    """Frontends that ask at once are heard in another order by each rank."""
    world = Desks()
    for version, name, ranks in ((NEW, "new", range(2)), (LATER, "later", range(2, RANKS))):
        world.prepare(version, name, ranks)
    for version, name, ranks in ((LATER, "later", range(2)), (NEW, "new", range(2, RANKS))):
        world.prepare(version, name, ranks)
    assert world.step() == MoveOrder(moving=True)
    assert {(a.rank < 2, a.version, a.state) for a in world.answers} == {
        (True, LATER, "failed"),
        (False, NEW, "failed"),
    }
    world.answers.clear()
    for version in (NEW, LATER):  # as each of the frontends does
        world.tell(FinishReload(version=version, commit=False))
    world.until("failed")
    assert world.in_use == [1.0] * RANKS
    assert not any(d.busy or d.reload.pending for d in world.desks)
