"""The tree of node leaders: everybody gets everybody's block; the dead are named, the living go on."""

import socket
import threading
import time

import pytest

from moe_runtime.engine.node_tree import Gathered, NodeTree, State, TreeShape
from moe_runtime.errors import PeerLost, StepTimeout
from tests.wall import at_most


@pytest.mark.parametrize(
    ("nodes", "arity", "depth"), [(1, 6, 0), (7, 6, 1), (40, 6, 2), (43, 6, 2), (44, 6, 3)]
)
def test_shape(nodes, arity, depth):
    shape = TreeShape(nodes, arity)
    assert shape.depth == depth
    assert sorted(shape.subtree(0)) == list(range(nodes))
    for node in range(nodes):
        assert all(shape.parent(c) == node for c in shape.children(node))


def having(gathered: Gathered, state: State) -> list[int]:
    """The nodes in a state."""
    return [node for node, s in enumerate(gathered.states) if s == state]


class Nodes:
    """A tree of threads."""

    def __init__(self, count: int, *, arity: int = 3, timeout: float = 20.0) -> None:
        shape = TreeShape(count, arity)
        self.trees = [NodeTree(n, shape, block_bytes=8, timeout=timeout) for n in range(count)]
        self.addresses = [t.listen() for t in self.trees]
        self.results: dict[int, list] = {n: [] for n in range(count)}
        self.states: dict[int, list[dict[State, list[int]]]] = {n: [] for n in range(count)}
        self.errors: dict[int, Exception] = {}

    def run(self, steps: int, behave=lambda node, step: True) -> None:
        """Each node takes `steps` steps; `behave` False closes its sockets, None makes it fall silent."""

        def one(node: int) -> None:
            tree = self.trees[node]
            try:
                tree.connect(self.addresses)
                for step in range(steps):
                    act = behave(node, step)
                    if act is None:
                        return
                    if act is False:
                        tree.close()
                        return
                    gathered = tree.allgather(step, (1000 * step + node).to_bytes(8, "little"))
                    self.states[node].append({s: having(gathered, s) for s in State})
                    if State.LATE in gathered.states or gathered.states[0] != State.HERE:
                        return
                    blocks = [gathered.block(n) for n in range(len(self.trees))]
                    self.results[node].append(
                        [None if b is None else int.from_bytes(b, "little") for b in blocks]
                    )
            except (PeerLost, StepTimeout) as error:
                self.errors[node] = error

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(self.trees))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for tree in self.trees:
            tree.close()


@pytest.mark.parametrize("count", [1, 2, 5, 14])
def test_all_nodes_see_all_blocks_of_every_step(count):
    nodes = Nodes(count)
    nodes.run(30)
    assert nodes.errors == {}
    expected = [[1000 * step + n for n in range(count)] for step in range(30)]
    assert all(seen == expected for seen in nodes.results.values())


def test_a_leaf_that_dies_is_missing_for_all_and_the_others_go_on():
    nodes = Nodes(9)
    nodes.run(10, lambda node, step: not (node == 7 and step == 4))
    assert nodes.errors == {}
    for node in set(range(9)) - {7}:
        seen = nodes.results[node]
        assert len(seen) == 10
        assert [row[7] is None for row in seen] == [False] * 4 + [True] * 6
        assert all(v is not None for row in seen for n, v in enumerate(row) if n != 7)


def test_a_node_in_the_middle_takes_its_subtree_with_it():
    nodes = Nodes(9)  # children of 1 are 4, 5, 6
    nodes.run(10, lambda node, step: not (node == 1 and step == 4))
    assert nodes.errors == {}
    for node in (0, 2, 3, 7, 8):
        last = nodes.states[node][9]
        assert (last[State.GONE], last[State.UNKNOWN], last[State.LATE]) == ([1], [4, 5, 6], [])
        assert [n for n, v in enumerate(nodes.results[node][-1]) if v is None] == [1, 4, 5, 6]
    for node in (4, 5, 6):  # they know who is gone, and no more
        last = nodes.states[node][-1]
        assert len(nodes.states[node]) == 5
        assert (last[State.GONE], last[State.HERE]) == ([1], [node])


@pytest.mark.parametrize("silent", [0, 1])
def test_all_others_name_the_silent_one_within_the_deadline(silent):
    """The root, or a node in the middle."""
    nodes = Nodes(9, timeout=2.0)
    began = time.monotonic()
    nodes.run(10, lambda node, step: None if node == silent and step == 3 else True)
    assert time.monotonic() - began < 2.0 + at_most(1.0)
    assert nodes.errors == {}
    for node in set(range(9)) - {silent}:
        assert len(nodes.states[node]) == 4
        assert nodes.states[node][3][State.LATE] == [silent], node
        assert nodes.states[node][3][State.GONE] == []


def test_who_never_connects_is_named():
    shape = TreeShape(4, 3)
    trees = [NodeTree(n, shape, block_bytes=8, timeout=0.5) for n in range(4)]
    addresses = [t.listen() for t in trees]
    # A connection that is not from the tree does no harm.
    with socket.create_connection(addresses[0]) as stranger:
        stranger.sendall((77).to_bytes(4, "little"))
        others = [threading.Thread(target=trees[n].connect, args=(addresses,)) for n in (1, 3)]
        for thread in others:
            thread.start()
        with pytest.raises(StepTimeout, match="waiting for rank 2, connecting") as caught:
            trees[0].connect(addresses)
        assert caught.value.ranks == (2,)
        for thread in others:
            thread.join(5)
    for tree in trees:
        tree.close()
