"""The mailbox: order, reuse of buffers, deadlines that name who is missing, dead and stopped ranks."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from moe_runtime.errors import StepTimeout
from moe_runtime.expert_parallel.mailbox import Mailbox
from moe_runtime.expert_parallel.where import StepAndLayer
from tests.expert_parallel.cases import Case, inputs, run_experts
from tests.expert_parallel.exercise import make_shm
from tests.expert_parallel.fallen import failures_without_rank_2, seconds_waited, timed
from tests.expert_parallel.world import Rank, World, run_world
from tests.wall import at_most

AREA = 4096


def mailboxes(num_ranks: int, **options) -> list[Mailbox]:
    """All ranks in this process, as threads may drive them."""
    sizes = {"num_ranks": num_ranks, "area_bytes": AREA, "in_flight": options.get("in_flight", 2)}
    window = Mailbox.create_window(**sizes)
    return [
        Mailbox.open(window.address, rank=r, **{"timeout": 20.0, **options, **sizes})
        for r in range(num_ranks)
    ]


def exchange(rank: Rank, transfers: int, in_flight: int) -> int:
    """Every rank writes its number into every area; readers dawdle between `wait` and `finish`."""

    def create():
        return Mailbox.create_window(num_ranks=rank.num_ranks, area_bytes=AREA, in_flight=in_flight)

    mailbox = Mailbox.open(
        rank.share_window("mail", create),
        rank=rank.rank,
        num_ranks=rank.num_ranks,
        area_bytes=AREA,
        timeout=60.0,
        in_flight=in_flight,
    )
    random_, pending, wrong = random.Random(rank.rank), [], 0
    for n in range(transfers + in_flight):
        if n < transfers:
            transfer = mailbox.begin("numbers")
            # Own area from its start, and a place of this rank's in everybody's area.
            transfer.areas[rank.rank, :2048].view(np.int64)[:] = n
            transfer.areas[:, 2048 + 8 * rank.rank :][:, :8].view(np.int64)[:] = 1000 * n + rank.rank
            transfer.post()
            pending.append((n, transfer))
        if n >= in_flight - 1 and pending:
            number, transfer = pending.pop(0)
            transfer.wait()
            if random_.random() < 0.1:
                time.sleep(random_.random() * 0.002)
            wrong += int((transfer.areas[:, :2048].view(np.int64) != number).any())
            mine = transfer.areas[rank.rank, 2048 : 2048 + 8 * rank.num_ranks].view(np.int64)
            wrong += int((mine != 1000 * number + np.arange(rank.num_ranks)).any())
            transfer.finish()
    return wrong


@pytest.mark.multiproc
@pytest.mark.parametrize(("ranks", "in_flight"), [(1, 1), (2, 1), (4, 2), (8, 1), (8, 2), (5, 3)])
def test_nothing_is_overwritten_before_it_is_read(tmp_path, ranks, in_flight):
    assert run_world(tmp_path, ranks, exchange, 300, in_flight) == [0] * ranks


def test_more_in_flight_than_planned_is_refused_as_a_bug():
    (mailbox,) = mailboxes(1)
    first, second = mailbox.begin("a"), mailbox.begin("b")
    for transfer in (first, second):
        transfer.post()
        transfer.wait()
    with pytest.raises(AssertionError, match="transfer 0 is not finished, and 2 may be in flight"):
        mailbox.begin("c")
    second.finish()
    with pytest.raises(AssertionError, match="transfer 0 is not finished"):
        mailbox.begin("c")
    first.finish()
    assert mailbox.begin("c").sequence == 2


def test_a_window_of_another_size_is_refused_as_a_bug():
    window = Mailbox.create_window(num_ranks=2, area_bytes=AREA)
    with pytest.raises(AssertionError, match="window too small"):
        Mailbox.open(window.address, rank=0, num_ranks=2, area_bytes=2 * AREA, timeout=1.0)


def test_the_deadline_names_step_layer_operation_and_every_missing_rank():
    boxes = mailboxes(4, timeout=0.3, where=StepAndLayer(step=17, layer=3))
    transfer = boxes[0].begin("combine")
    transfer.post()
    boxes[2].begin("combine").post()
    began = time.monotonic()
    with pytest.raises(StepTimeout) as caught:
        transfer.wait()
    assert 0.25 < time.monotonic() - began < at_most(2)
    error = caught.value
    assert (error.step, error.layer, error.operation, error.ranks) == (17, 3, "combine", (1, 3))
    assert "waiting for ranks 1, 3, layer 3, combine, step 17" in str(error)


def test_the_place_is_that_of_the_beginning():
    place = StepAndLayer(step=1, layer=5)
    (mailbox, _) = mailboxes(2, timeout=0.05, where=place)
    transfer = mailbox.begin("dispatch")
    place.layer = 6
    transfer.post()
    with pytest.raises(StepTimeout) as caught:
        transfer.wait()
    assert caught.value.layer == 5


def test_ranks_that_are_not_alive_are_not_waited_for():
    boxes = mailboxes(3, timeout=5.0)
    for box in boxes:
        box.alive[1] = False
    done = []

    def run(box: Mailbox) -> None:
        for _ in range(50):
            transfer = box.begin("x")
            transfer.post()
            transfer.wait()
            transfer.finish()
        done.append(box.rank)

    threads = [threading.Thread(target=run, args=(boxes[r],)) for r in (0, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert sorted(done) == [0, 2]


def test_the_transfer_is_complete_when_the_last_rank_has_posted():
    first, second = mailboxes(2)
    a, b = first.begin("x"), second.begin("x")
    a.post()
    time.sleep(0.05)
    b.post()
    time.sleep(0.05)
    a.wait()
    assert a.complete_at == pytest.approx(b.posted_at, abs=1e-6)
    assert a.complete_at - a.posted_at >= 0.05


def fall_in_combine(rank: Rank, number: int, timeout: float) -> None:
    """Rank 2 sends itself a signal between dispatch and combine; the others say how long they waited."""
    case = Case(tokens=(5,) * rank.num_ranks)
    buffer = make_shm(case, rank, "fall", timeout=timeout)
    sent = inputs(case, rank.rank)
    for _ in range(2):
        rows = buffer.dispatch(sent.x_TH, sent.slot_ids_TK, sent.weights_TK).wait()
        buffer.combine(run_experts(case, rows, rank.rank), rows).wait()
    rows = buffer.dispatch(sent.x_TH, sent.slot_ids_TK, sent.weights_TK).wait()
    if rank.rank == 2:
        os.kill(os.getpid(), number)
    with timed():
        buffer.combine(run_experts(case, rows, rank.rank), rows).wait()


@pytest.mark.multiproc
def test_a_stopped_rank_is_named_by_all_others_within_the_deadline(tmp_path):
    for failure in failures_without_rank_2(tmp_path, fall_in_combine, signal.SIGSTOP, 1.5):
        assert failure.kind == "StepTimeout"
        assert "waiting for rank 2, layer 2, combine, step 1" in failure.message
        assert 1.4 < seconds_waited(failure) < at_most(5)


@pytest.mark.multiproc
def test_a_killed_rank_is_noticed_long_before_the_deadline(tmp_path):
    for failure in failures_without_rank_2(tmp_path, fall_in_combine, signal.SIGKILL, 60.0):
        assert failure.kind == "PeerLost"
        assert "waiting for rank 2, layer 2, combine, step 1: no longer running" in failure.message
        assert seconds_waited(failure) < at_most(1)


def test_posting_before_dying_counts(tmp_path):
    """A rank that has done its part of a transfer may be gone when others look."""
    with World(tmp_path, 2, post_and_die) as world:
        assert world.results([0], deadline=30) == ["complete"]


def post_and_die(rank: Rank) -> str:
    def create():
        return Mailbox.create_window(num_ranks=2, area_bytes=AREA)

    address = rank.share_window("mail", create)
    mailbox = Mailbox.open(address, rank=rank.rank, num_ranks=2, area_bytes=AREA, timeout=30.0)
    transfer = mailbox.begin("last")
    if rank.rank == 1:
        transfer.post()
        os.kill(os.getpid(), signal.SIGKILL)
    while not mailbox._is_dead(1):
        time.sleep(0.01)
    transfer.post()
    transfer.wait()
    return "complete"
