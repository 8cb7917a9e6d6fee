"""Transactions of several ranks as threads of control in one process: commits, faults and roll-backs.

Ranks step in turn, as `agree` would have them; couriers are threads that tests hold, slow down or break.
"""

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from moe_runtime.engine.agree import AgreeLimits, MoveOrder, StepProposal, agree
from moe_runtime.engine.balancing.courier import Courier, Piece, Staging
from moe_runtime.engine.balancing.desk import ExpertDesk
from moe_runtime.engine.balancing.mover import Mover
from moe_runtime.engine.balancing.registry import ExpertRegistry
from moe_runtime.engine.balancing.wire import NewPlacement
from moe_runtime.expert_parallel.slot_table import SlotTable
from moe_runtime.placement.placement import Placement, linear
from tests.engine.balancing.live import moves, rearranged

RANKS, LAYERS, EXPERTS, SLOTS = 4, 3, 12, 5
LIMITS = AgreeLimits(max_batch_tokens=8, chunk_tokens=8, dispatch_max_tokens=8)
PART_BYTES = (40, 24)


def contents(layer: int, expert: int) -> list[np.ndarray]:
    """An expert's tensors, unlike any other's."""
    rng = np.random.default_rng(1000 * layer + expert)
    return [rng.integers(0, 256, n, dtype=np.uint8) for n in PART_BYTES]


@dataclass
class Ranks:
    """`now` is their clock. `copy` is what couriers copy with."""

    copy: Callable[[np.ndarray, np.ndarray], None] = np.copyto
    timeout: float = 10.0
    bytes_per_step: int = 100
    now: float = 0.0
    movers: list[Mover] = field(default_factory=list)
    orders: list[MoveOrder] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = linear(num_layers=LAYERS, num_experts=EXPERTS, num_ranks=RANKS, redundant_experts=8)
        start = rearranged(table, "back", np.random.default_rng(0))
        staging = [
            Staging(
                Staging.create_window(SLOTS, sum(PART_BYTES)), num_slots=SLOTS, slot_bytes=sum(PART_BYTES)
            )
            for _ in range(RANKS)
        ]
        for rank in range(RANKS):
            views = []
            for layer in range(LAYERS):
                parts = [np.zeros((SLOTS, n), np.uint8) for n in PART_BYTES]
                for slot, expert in enumerate(start.local_experts(layer, rank).tolist()):
                    for part, values in zip(parts, contents(layer, max(expert, 0)), strict=True):
                        part[slot] = values if expert >= 0 else 0
                views.append(tuple((f"part{i}", p) for i, p in enumerate(parts)))
            mover = Mover(
                rank=rank,
                placement=start,
                table=SlotTable(start, source_rank=rank, device=torch.device("cpu")),
                registry=ExpertRegistry(tuple(views)),
                staging=staging,
                bytes_per_step=self.bytes_per_step,
                timeout=self.timeout,
                courier=Courier(copy=self.copy),
            )
            mover.courier.start()
            self.movers.append(mover)

    def aim(self, target: Placement, attempt: int, ranks: range = range(RANKS)) -> None:
        current = self.movers[0].placement
        message = NewPlacement.of(attempt, current, target, moves(current, target))
        for rank in ranks:
            self.movers[rank].aim(message, self.now)

    def step(self, desks: Sequence[ExpertDesk] = ()) -> MoveOrder:
        """One agreed step of all ranks, or of their desks; checks what it leaves."""
        offers = [d.offer() for d in desks] or [m.offer(self.now) for m in self.movers]
        proposals = [
            StepProposal(
                decode_tokens=1,
                prefill_tokens=0,
                in_flight=0,
                stop=False,
                placement_epoch=m.placement.epoch,
                membership_epoch=0,
                alive=(True,) * RANKS,
                move=offer,
            )
            for m, offer in zip(self.movers, offers, strict=True)
        ]
        wire = [StepProposal.from_vector(p.to_vector(), RANKS) for p in proposals]
        order = agree(wire, LIMITS).move
        for desk in desks:
            desk.follow(order)
        for mover in () if desks else self.movers:
            mover.follow(order, self.now)
        self.orders.append(order)
        self.check()
        time.sleep(0.0005)
        return order

    def check(self) -> None:
        """All ranks have the same placement; slots and tables are what it says."""
        first = self.movers[0].placement
        start, slots = first.replicas
        for mover in self.movers:
            assert mover.placement.digest == first.digest
            assert mover.table.epoch == first.epoch
            assert (mover.table.replica_start.numpy() == start).all()
            assert (mover.table.replica_slots.numpy() == slots).all()
            assert (mover.table.cumulative.numpy() == first.cumulative_csr).all()
            for layer in range(LAYERS):
                for slot, expert in enumerate(first.local_experts(layer, mover.rank).tolist()):
                    if expert >= 0:
                        for part, values in zip(
                            mover.registry.parts(layer, slot), contents(layer, expert), strict=True
                        ):
                            assert (part == values).all(), (mover.rank, layer, slot)

    def until(self, condition: Callable[[], bool], steps: int = 2000) -> None:
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not within {steps} steps")

    @property
    def at_rest(self) -> bool:
        return not any(m.busy for m in self.movers)

    def reach(self, target: Placement, attempt: int) -> None:
        self.aim(target, attempt)
        self.until(lambda: self.at_rest)
        assert (self.movers[0].placement.slot_to_expert_LS == target.slot_to_expert_LS).all()

    def close(self) -> None:
        for mover in self.movers:
            mover.close()


def target_of(ranks: Ranks, kind: str, seed: int) -> Placement:
    return rearranged(ranks.movers[0].placement, kind, np.random.default_rng(seed))


def test_layers_are_committed_one_at_a_time_everywhere_at_once():
    ranks = Ranks()
    begin = ranks.movers[0].placement.epoch
    for attempt, kind in enumerate(("permute", "extra", "back", "extra", "permute"), start=1):
        ranks.reach(target_of(ranks, kind, attempt), attempt)
    assert ranks.movers[0].placement.epoch == begin + 5 * LAYERS
    assert sum(o.commit > 0 for o in ranks.orders) == 5 * LAYERS
    assert sum(o.begin > 0 for o in ranks.orders) == 5 * LAYERS
    assert not any(o.begin and o.commit for o in ranks.orders)
    assert sum(m.aborted for m in ranks.movers) == 0
    ranks.close()


def test_rebalances_leave_no_byte_behind():
    """After the first one all arrays that numpy holds are as large as before, and tables where they were."""
    ranks = Ranks()

    def held(attempts: range) -> tuple[int, list[int]]:
        for attempt in attempts:
            ranks.reach(target_of(ranks, "permute", attempt), attempt)
        ranks.orders.clear()
        gc.collect()
        arrays = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)]
        )
        tables = (m.table for m in ranks.movers)
        places = [t.data_ptr() for m in tables for t in (m.replica_start, m.replica_slots, m.cumulative)]
        return sum(trace.size for trace in arrays.traces), places

    tracemalloc.start()
    try:
        assert held(range(1, 2)) == held(range(2, 4))
    finally:
        tracemalloc.stop()
    ranks.close()


def test_no_more_bytes_leave_a_rank_in_a_step_than_allowed():
    ranks, spies = Ranks(bytes_per_step=48), []
    for mover in ranks.movers:
        spies.append(Spy(mover.courier))
        mover.courier = spies[-1]  # type: ignore[assignment]
    ranks.reach(target_of(ranks, "permute", 1), 1)
    given = [n for spy in spies for n in spy.given]
    assert 0 < max(given) <= 48
    assert sum(given) == sum(PART_BYTES) * sum(m.moves for m in ranks.movers)
    ranks.close()


class Spy:
    """A courier that notes the bytes of each batch."""

    def __init__(self, courier: Courier) -> None:
        self._courier, self.given = courier, list[int]()

    def give(self, batch: list[Piece]) -> None:
        self.given.append(sum(len(p.source) for p in batch))
        self._courier.give(batch)

    def __getattr__(self, name: str) -> object:
        return getattr(self._courier, name)


def test_a_copy_that_fails_in_the_middle_of_a_layer_is_rolled_back(caplog):
    broken, copied = threading.Event(), []

    def copy(target: np.ndarray, source: np.ndarray) -> None:
        copied.append(len(source))
        if broken.is_set() and len(copied) % 3 == 0:
            raise OSError("the link is down")
        np.copyto(target, source)

    ranks = Ranks(copy=copy)
    ranks.reach(target_of(ranks, "extra", 1), 1)
    before = ranks.movers[0].placement
    broken.set()
    ranks.aim(target_of(ranks, "permute", 2), 2)
    ranks.until(lambda: ranks.at_rest)
    assert ranks.movers[0].placement.digest == before.digest
    assert [m.aborted for m in ranks.movers] == [1] * RANKS
    assert "the link is down" in caplog.text
    broken.clear()
    ranks.reach(target_of(ranks, "permute", 3), 3)
    ranks.close()


def test_a_rank_that_hangs_is_given_up_and_its_late_bytes_harm_nothing():
    """One courier stops in the middle of a copy, for longer than the timeout; later it writes what it had."""
    hang, stuck = threading.Event(), threading.Event()

    def copy(target: np.ndarray, source: np.ndarray) -> None:
        if hang.is_set() and not stuck.is_set():
            stuck.set()
            while hang.is_set():
                time.sleep(0.001)
        np.copyto(target, source)

    ranks = Ranks(copy=copy)
    before = ranks.movers[0].placement
    hang.set()
    ranks.aim(target_of(ranks, "permute", 1), 1)
    ranks.until(stuck.is_set)
    for _ in range(20):
        assert not ranks.step().commit
    ranks.now += 10.5
    ranks.until(lambda: ranks.at_rest, 5)
    assert ranks.movers[0].placement.digest == before.digest
    assert [m.aborted for m in ranks.movers] == [1] * RANKS
    # The next attempt does not begin while a copy of the last one is in hand.
    ranks.aim(target_of(ranks, "extra", 2), 2)
    for _ in range(20):
        assert not ranks.step().begin
    hang.clear()
    ranks.until(lambda: ranks.at_rest)
    assert ranks.movers[0].placement.epoch == before.epoch + LAYERS
    assert [m.aborted for m in ranks.movers] == [1] * RANKS
    ranks.close()


def test_another_rebalance_ends_the_one_on_its_way():
    ranks = Ranks(bytes_per_step=40)
    ranks.aim(target_of(ranks, "permute", 1), 1)
    ranks.until(lambda: any(o.commit for o in ranks.orders))
    ranks.movers[0].give_up("another rebalance was asked for")
    ranks.until(lambda: ranks.at_rest, 3)
    assert ranks.movers[0].placement.epoch == 1  # what was committed stays
    ranks.reach(target_of(ranks, "back", 2), 2)
    ranks.close()


def test_a_target_that_some_rank_never_hears_of_is_dropped():
    ranks = Ranks()
    before = ranks.movers[0].placement
    ranks.aim(target_of(ranks, "permute", 1), 1, range(RANKS - 1))
    for _ in range(5):
        assert ranks.step() == MoveOrder(moving=True)
    ranks.now += 10.5
    ranks.until(lambda: ranks.at_rest, 3)
    assert ranks.movers[0].placement.digest == before.digest
    ranks.reach(target_of(ranks, "permute", 2), 2)
    ranks.close()


def test_a_damaged_target_is_an_error():
    ranks = Ranks()
    current = ranks.movers[0].placement
    target = target_of(ranks, "permute", 1)
    message = NewPlacement.of(1, current, target, moves(current, target))
    shifted = NewPlacement.of(1, current, target_of(ranks, "permute", 2), moves(current, target))
    with pytest.raises(ValueError, match="arrived for"):
        type(message)(
            attempt=1,
            base=message.base,
            digest=message.digest,
            slots=shifted.slots,
            starts=shifted.starts,
            moves=message.moves,
        ).target(current)
    ranks.close()


def test_split_weights_alone_move_nothing():
    ranks = Ranks()
    ranks.reach(target_of(ranks, "extra", 1), 1)
    current = ranks.movers[0].placement
    start, slots = current.replicas
    starts = np.zeros(current.slot_to_expert_LS.shape, np.uint16)
    for layer in range(LAYERS):
        for expert in np.flatnonzero(current.replica_counts[layer] > 1):
            mine = slots[layer, start[layer, expert] : start[layer, expert + 1]]
            starts[layer, mine[1:]] = 60000
    target = Placement(
        slot_to_expert_LS=current.slot_to_expert_LS,
        num_experts=EXPERTS,
        num_ranks=RANKS,
        cumulative_LS=starts,
    )
    moved = sum(m.moves for m in ranks.movers)
    ranks.reach(target, 2)
    assert sum(m.moves for m in ranks.movers) == moved
    assert ranks.movers[0].placement.epoch == current.epoch + 1  # all layers at once
    assert (ranks.movers[0].table.cumulative.numpy() == target.cumulative_csr).all()
    ranks.close()
