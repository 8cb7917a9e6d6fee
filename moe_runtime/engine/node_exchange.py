"""The transport of step agreement across hosts: a shared window on each, a tree of their leaders between.

Ranks of a host post their vectors in its window. The leader (the host's first rank) takes them, with
a status each, through the tree, and publishes what came back, for which the others wait: so a rank is
late or dead for all ranks of the instance or for none, and all name the same ones. Who waits for less
gives up earlier, so that everybody hears of it within the deadline.

Window: that of SharedExchange, then a line with the leader's flag, then int64 [2, R, 1 + words]: a
status and a vector per rank of the instance, in two buffers by parity of the step. A leader writes step
n+2 after all ranks of its host have posted it, hence have read n+1.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.agree import vector_words
from moe_runtime.engine.exchange import LOOK_SECONDS, NOBODY, Missing, SharedExchange
from moe_runtime.engine.node_tree import Gathered, NodeTree, State, TreeShape
from moe_runtime.shared_memory import CACHE_LINE, Flag, Window, WindowAddress

# Part of the deadline in which the ranks of a host must have posted; the tree's own parts are above it.
HOST_PART = 0.6


class NodeExchange:
    """`nodes[i]` are the ranks of host i by their number in the instance. `tree` is for leaders only."""

    def __init__(
        self, window: Window, *, rank: int, nodes: Sequence[range], timeout: float, tree: NodeTree | None
    ) -> None:
        self._nodes, self._timeout = nodes, timeout
        here = nodes[node_of(nodes, rank)]
        assert (tree is not None) == (rank == here.start), "leaders have a tree, others have none"
        self._leader, self._tree = here.start, tree
        num_ranks = nodes[-1].stop
        self._host = SharedExchange(window, rank=rank, num_ranks=num_ranks, timeout=timeout, here=here)
        start = SharedExchange.window_bytes(num_ranks, len(here))
        self._flag = Flag(window.array(np.int32, (1,), offset=start))
        shape = (2, num_ranks, 1 + vector_words(num_ranks))
        self._all: NDArray[np.int64] = window.array(np.int64, shape, offset=start + CACHE_LINE).view(np.int64)
        self._block = np.zeros((max(len(n) for n in nodes), shape[2]), np.int64)

    @staticmethod
    def create_window(nodes: Sequence[range], node: int) -> Window:
        """LOCAL: a leader makes the window of its host and publishes its address."""
        num_ranks = nodes[-1].stop
        size = SharedExchange.window_bytes(num_ranks, len(nodes[node])) + CACHE_LINE
        return Window.create("moe-runtime-agree", size + 2 * 8 * num_ranks * (1 + vector_words(num_ranks)))

    @staticmethod
    def make_tree(nodes: Sequence[range], node: int, *, timeout: float) -> NodeTree:
        """LOCAL: a leader's place in the tree, to `listen` at before others `connect`."""
        rows, words = max(len(n) for n in nodes), 1 + vector_words(nodes[-1].stop)
        return NodeTree(
            node,
            TreeShape(len(nodes)),
            block_bytes=rows * words * 8,
            timeout=timeout,
            leaders=[ranks.start for ranks in nodes],
        )

    @classmethod
    def open(
        cls,
        address: WindowAddress,
        *,
        rank: int,
        nodes: Sequence[range],
        timeout: float,
        tree: NodeTree | None,
    ) -> "NodeExchange":
        """LOCAL: OSError when the host's leader is gone. The tree must be connected before the first step."""
        return cls(Window.open(address), rank=rank, nodes=nodes, timeout=timeout, tree=tree)

    def __call__(self, step: int, vector: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Raises StepTimeout naming the ranks that did not post in time, PeerLost naming those that died."""
        missing = self._host.collect(step, vector, HOST_PART * self._timeout)
        if self._leader in missing.late + missing.dead:
            missing.check(step, HOST_PART * self._timeout)
        if self._tree is not None:
            self._lead(step, missing, self._tree)
        else:
            self._follow(step).check(step, self._timeout)
        table = self._all[step % 2]
        states = table[:, 0]
        Missing(
            dead=tuple(np.flatnonzero(states == State.GONE).tolist()),
            late=tuple(np.flatnonzero(states == State.LATE).tolist()),
        ).check(step, self._timeout)
        return [row.copy() for row in table[:, 1:]]

    def look(self, step: int) -> None:
        """Raise PeerLost naming ranks of this host that have ended, and to its leader those of other hosts
        whose leader has: a host whose leader is gone ends, so everybody hears of it.
        """
        self._host.look(step)
        if self._tree is not None:
            gone = [rank for node in self._tree.hung_up() for rank in self._nodes[node]]
            Missing(dead=tuple(gone)).check(step, 0.0)

    def _lead(self, step: int, missing: Missing, tree: NodeTree) -> None:
        """Take this host's vectors to the others, and publish theirs."""
        here = self._nodes[tree.node]
        rows = self._block[: len(here)]
        rows[:, 0] = State.HERE
        rows[:, 1:] = self._host.vectors[:, step % 2]
        for ranks, state in ((missing.dead, State.GONE), (missing.late, State.LATE)):
            rows[[here.index(r) for r in ranks], 0] = state
        self._publish(step, tree.allgather(step, self._block.data.cast("B")))

    def _publish(self, step: int, gathered: Gathered) -> None:
        """What came, to the ranks of this host. One that is gone or late is so with all its ranks, as only
        its leader speaks for them.
        """
        table = self._all[step % 2]
        for node, ranks in enumerate(self._nodes):
            block = gathered.block(node)
            if block is None:
                table[ranks.start : ranks.stop, 0] = gathered.states[node]
            else:
                rows = np.frombuffer(block, np.int64).reshape(self._block.shape)
                table[ranks.start : ranks.stop] = rows[: len(ranks)]
        self._flag.set(step + 1)

    def _follow(self, step: int) -> Missing:
        """Wait for what the leader publishes, once it has what the ranks of this host posted."""
        deadline = time.monotonic() + self._timeout
        while not self._flag.wait(step + 1, min(deadline, time.monotonic() + LOOK_SECONDS)):
            if self._host.has_died(0) and self._flag.value < step + 1:
                return Missing(dead=(self._leader,))
            if time.monotonic() >= deadline:
                return Missing(late=(self._leader,))
        return NOBODY


def node_of(nodes: Sequence[range], rank: int) -> int:
    """The host of a rank."""
    return next(i for i, ranks in enumerate(nodes) if rank in ranks)
