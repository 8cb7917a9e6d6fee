"""Who is missing from a collective: counts and processes of this host explain gloo's errors."""

import os
import signal
import subprocess
import sys
import time

import pytest

from moe_runtime.errors import PeerLost, StepTimeout
from moe_runtime.expert_parallel.roll_call import RollCall
from moe_runtime.expert_parallel.where import StepAndLayer
from tests.expert_parallel.cases import Case, inputs, run_experts
from tests.expert_parallel.exercise import make_torch
from tests.expert_parallel.fallen import failures_without_rank_2, seconds_waited, timed
from tests.expert_parallel.world import Rank
from tests.wall import at_most


def rolls(num_ranks: int, *, elsewhere: int = 0) -> list[RollCall]:
    """All ranks of a host in this process; `elsewhere` more are on another."""
    window, here = RollCall.create_window(num_ranks), range(num_ranks)
    where = StepAndLayer(step=7, layer=3)
    return [RollCall(window, rank=r, here=here, num_ranks=num_ranks + elsewhere, where=where) for r in here]


def fail(roll: RollCall, text: str = "gloo: something about a socket") -> None:
    with roll.begin("combine").explained():
        raise RuntimeError(text)


def fail_again(roll: RollCall) -> None:
    """The same collective, that is: its number once more."""
    roll._words[roll._line] -= 1
    fail(roll)


def test_those_who_did_not_come_are_named():
    first, second, third, fourth = rolls(4)
    second.begin("combine")
    with pytest.raises(StepTimeout, match=r"waiting for ranks 2, 3, layer 3, combine, step 7") as caught:
        fail(first)
    assert caught.value.ranks == (2, 3)
    assert "socket" in str(caught.value.__cause__)
    # The next collective: the others are one behind, or two.
    with pytest.raises(StepTimeout) as caught:
        fail(first)
    assert caught.value.ranks == (1, 2, 3)


def test_of_another_host_it_is_only_known_that_all_came_here():
    first, second = rolls(2, elsewhere=2)
    second.begin("dispatch")
    with pytest.raises(StepTimeout) as caught:
        fail(first, "Timed out waiting 120000ms for recv operation to complete")
    assert caught.value.ranks == (2, 3)
    second.begin("dispatch")
    with pytest.raises(PeerLost, match="waiting for ranks 2, 3, layer 3, combine, step 7: connection broken"):
        fail(first, "Connection closed by peer [127.0.0.1]:17404")


def test_an_error_that_has_nothing_to_do_with_peers_stays_what_it_is():
    first, second = rolls(2)
    second.begin("combine")
    with pytest.raises(RuntimeError, match="about a socket"):
        fail(first)


def write_pid(roll: RollCall, pid: int) -> None:
    roll._words[roll._line + 1] = pid


def test_a_dead_rank_nobody_reaped_is_dead():
    """A zombie answers to signal 0 as if it lived."""
    first, second, third = rolls(3)
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        os.kill(child.pid, 0)
        write_pid(third, child.pid)
        with pytest.raises(PeerLost, match="waiting for rank 2, layer 3, combine, step 7: no longer running"):
            fail(first)
        third.begin("combine")  # came, and died in the middle of it
        second.begin("combine")
        with pytest.raises(PeerLost, match="waiting for rank 2, "):
            fail_again(first)
    finally:
        child.wait()


def fall_in_combine(rank: Rank, number: int, timeout: float) -> None:
    """Rank 2 sends itself a signal between dispatch and combine; the others say how long they waited."""
    rank.join_gloo(timeout)
    case = Case(tokens=(5,) * rank.num_ranks)
    buffer = make_torch(case, rank, "fall")
    address = rank.share_window("roll", lambda: buffer.create_window(rank.num_ranks))
    buffer.connect(address, here=range(rank.num_ranks), where=StepAndLayer(step=1, layer=2))
    sent = inputs(case, rank.rank)
    for turn in range(3):
        rows = buffer.dispatch(sent.x_TH, sent.slot_ids_TK, sent.weights_TK).wait()
        if rank.rank == 2 and turn == 2:
            os.kill(os.getpid(), number)
        if rank.rank == 1:
            time.sleep(0.2)  # the first to fail leaves, and must not be taken for the reason
        with timed():
            buffer.combine(run_experts(case, rows, rank.rank), rows).wait()


@pytest.mark.multiproc
def test_a_stopped_rank_is_named_by_all_others_within_the_deadline(tmp_path):
    for failure in failures_without_rank_2(tmp_path, fall_in_combine, signal.SIGSTOP, 2.0):
        assert failure.kind == "StepTimeout", failure.trace
        assert "waiting for rank 2, layer 2, combine, step 1" in failure.message
        assert 1.5 < seconds_waited(failure) < at_most(3)


@pytest.mark.multiproc
def test_a_killed_rank_is_noticed_long_before_the_deadline(tmp_path):
    for failure in failures_without_rank_2(tmp_path, fall_in_combine, signal.SIGKILL, 30.0):
        assert failure.kind == "PeerLost", failure.trace
        assert "waiting for rank 2, layer 2, combine, step 1: no longer running" in failure.message
        assert seconds_waited(failure) < at_most(2)
