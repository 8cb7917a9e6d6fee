"""Agreement across hosts: everybody sees all vectors, and names the same missing ranks."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from moe_runtime.engine.agree import vector_words
from moe_runtime.engine.node_exchange import NodeExchange, node_of
from moe_runtime.errors import PeerLost, StepTimeout
from tests.wall import at_most

NODES = (range(3), range(3, 5), range(5, 6))
RANKS = 6
WORDS = vector_words(RANKS)


class Instance:
    """The ranks of three hosts as threads; `results` are the first words of what each rank saw."""

    def __init__(self, timeout: float) -> None:
        windows = [NodeExchange.create_window(NODES, node) for node in range(len(NODES))]
        trees = [NodeExchange.make_tree(NODES, node, timeout=timeout) for node in range(len(NODES))]
        addresses = [tree.listen() for tree in trees]
        connecting = [threading.Thread(target=t.connect, args=(addresses,)) for t in trees]
        for thread in connecting:
            thread.start()
        for thread in connecting:
            thread.join(10)
        self.trees = trees
        self.exchanges = []
        for rank in range(RANKS):
            node = node_of(NODES, rank)
            self.exchanges.append(
                NodeExchange(
                    windows[node],
                    rank=rank,
                    nodes=NODES,
                    timeout=timeout,
                    tree=trees[node] if rank == NODES[node].start else None,
                )
            )
        self.results: dict[int, list[list[int]]] = {r: [] for r in range(RANKS)}
        self.errors: dict[int, Exception] = {}

    def run(self, steps: int, takes_part=lambda rank, step: True) -> None:
        def one(rank: int) -> None:
            try:
                for step in range(steps):
                    if not takes_part(rank, step):
                        return
                    if (step + 5 * rank) % 31 == 0:
                        time.sleep(0.001)
                    seen = self.exchanges[rank](step, np.full(WORDS, 1000 * step + rank, np.int64))
                    self.results[rank].append([int(v[-1]) for v in seen])
            except (PeerLost, StepTimeout) as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=one, args=(r,)) for r in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for tree in self.trees:
            tree.close()


def test_all_ranks_of_all_hosts_see_the_same_vectors():
    instance = Instance(20.0)
    instance.run(150)
    assert instance.errors == {}
    expected = [[1000 * step + r for r in range(RANKS)] for step in range(150)]
    assert all(seen == expected for seen in instance.results.values())


@pytest.mark.parametrize("silent", [0, 1, 3, 4])
def test_all_other_ranks_name_the_silent_one(silent):
    """The root's leader, a rank below it, another host's leader, the rank below that one."""
    instance = Instance(2.0)
    began = time.monotonic()
    instance.run(10, lambda rank, step: not (rank == silent and step == 4))
    assert time.monotonic() - began < 2.0 + at_most(1.5)
    assert set(instance.errors) == set(range(RANKS)) - {silent}
    below = {0: {0, 1, 2}, 3: {3, 4}}.get(silent, {silent})
    for rank, error in instance.errors.items():
        assert isinstance(error, StepTimeout), rank
        assert error.step == 4
        # Ranks of its own host know the leader; elsewhere only its host is known to be silent.
        assert set(error.ranks) in ({silent}, below), (rank, error)


def test_a_dead_rank_is_named_by_the_ranks_of_all_hosts():
    instance = Instance(30.0)
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    for rank in (3, 4):
        instance.exchanges[rank]._host._pids[1][0] = child.pid
    began = time.monotonic()
    instance.run(3, lambda rank, step: not (rank == 4 and step == 1))
    child.wait()
    assert time.monotonic() - began < at_most(5)
    assert set(instance.errors) == {0, 1, 2, 3, 5}
    for error in instance.errors.values():
        assert isinstance(error, PeerLost)
        assert "waiting for rank 4, agreement, step 1: no longer running" in str(error)


def test_a_leader_that_died_with_what_it_had_taken_is_named_by_its_host():
    instance = Instance(30.0)
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    host = instance.exchanges[4]._host
    host._pids[0][0] = child.pid
    host._flags[0].set(1)  # it posted, and never published
    began = time.monotonic()
    with pytest.raises(PeerLost, match="waiting for rank 3, agreement, step 0: no longer running"):
        instance.exchanges[4](0, np.zeros(WORDS, np.int64))
    child.wait()
    assert time.monotonic() - began < at_most(5)
    for tree in instance.trees:
        tree.close()


def test_parked_ranks_hear_of_hosts_that_are_gone():
    """A neighbour in the tree first; what it leaves behind ends as well, so in the end everybody."""
    instance = Instance(30.0)
    for exchange in instance.exchanges:
        exchange.look(0)
    up = instance.trees[1]._up
    assert up is not None
    up.sendall(b"early")  # that host has been woken already
    instance.exchanges[0].look(0)
    instance.trees[2].close()
    with pytest.raises(PeerLost, match="waiting for rank 5, agreement, step 4: no longer running"):
        instance.exchanges[0].look(4)
    instance.exchanges[3].look(4)
    instance.trees[0].close()
    with pytest.raises(PeerLost, match="waiting for ranks 0, 1, 2, agreement, step 4: no longer running"):
        instance.exchanges[3].look(4)
    instance.trees[1].close()
