"""All-gather of small fixed-size blocks over a tree of node leaders, by TCP. No torch.

Leaders form a k-ary tree (children of i are k*i+1 .. k*i+k). Blocks travel up, each node adding
its own, and the whole comes down: 2 * depth hops, 2 * (N - 1) messages. Blocks lie in preorder, so
a subtree is one piece of the buffer: it is received in place and sent from there, never parsed.
A message is a header, one state byte per node, and the blocks.

A node whose connection breaks is GONE for everybody from then on, one that is silent too long is
LATE, and what hangs below either is UNKNOWN. Nobody waits longer than the deadline, and who waits
nearer to the leaves gives up earlier, so that what it has to tell still arrives. N nodes, B bytes
per block.
"""

import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from moe_runtime.errors import PeerLost, StepTimeout

# Parts of the deadline: a node waits for its children so long at the leaves and at the root, then so long
# for its parent's answer near the root and at the leaves.
CHILDREN = (0.65, 0.85)
ANSWER = (0.87, 0.97)
CONNECTING = "connecting the agreement tree of nodes"
_HEADER = struct.Struct("<q")  # step
Address = tuple[str, int]


class State(IntEnum):
    """Of a node in a step. UNKNOWN: its block would have come through a node that is gone or late."""

    GONE = 0
    HERE = 1
    LATE = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Gathered:
    """All blocks of a step. `blocks` is valid until the next `allgather`.

    states  bytes [N], a State per node number
    blocks  [N * B] in the order `order` of node numbers
    """

    order: tuple[int, ...]
    states: bytes
    blocks: memoryview

    def block(self, node: int) -> memoryview | None:
        """The block of a node, None if it did not come."""
        if self.states[node] != State.HERE:
            return None
        size, place = len(self.blocks) // len(self.order), self.order.index(node)
        return self.blocks[place * size : (place + 1) * size]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Who is whose child. `arity` 6 gives depth 2 for up to 43 nodes."""

    num_nodes: int
    arity: int = 6

    def parent(self, node: int) -> int | None:
        return None if node == 0 else (node - 1) // self.arity

    def children(self, node: int) -> list[int]:
        first = self.arity * node + 1
        return list(range(first, min(first + self.arity, self.num_nodes)))

    def subtree(self, node: int) -> list[int]:
        """The node and all below it, in preorder: the order in which their blocks travel."""
        return [node, *(n for child in self.children(node) for n in self.subtree(child))]

    @property
    def depth(self) -> int:
        """Hops from the farthest node to the root."""
        return self.level(self.num_nodes - 1)

    def level(self, node: int) -> int:
        """Hops from the node to the root."""
        hops = 0
        while (up := self.parent(node)) is not None:
            hops, node = hops + 1, up
        return hops


class NodeTree:
    """One leader's place in the tree. Use: `listen`, publish the address, `connect`, `allgather` per step.

    `leaders`: the rank that stands for each node in the errors of `connect`; by default the node's number.
    """

    def __init__(
        self,
        node: int,
        shape: TreeShape,
        *,
        block_bytes: int,
        timeout: float,
        leaders: Sequence[int] | None = None,
    ) -> None:
        self.node = node
        self._leaders = range(shape.num_nodes) if leaders is None else leaders
        self.shape = shape
        self._timeout = timeout
        self._listener: socket.socket | None = None
        self._up: socket.socket | None = None
        self._down: dict[int, socket.socket] = {}
        order = self._order = tuple(shape.subtree(0))
        self._header = memoryview(bytearray(_HEADER.size))
        self._states = memoryview(bytearray(len(order)))
        self._blocks = memoryview(bytearray(len(order) * block_bytes))
        self._pieces = {n: self._piece(n, block_bytes) for n in (0, node, *shape.children(node))}
        place = order.index(node)
        self._own = self._blocks[place * block_bytes : (place + 1) * block_bytes]
        self._own_place = place
        level = shape.level(node) / max(1, shape.depth)
        self._children_seconds = timeout * (CHILDREN[1] - level * (CHILDREN[1] - CHILDREN[0]))
        self._answer_seconds = timeout * (ANSWER[0] + level * (ANSWER[1] - ANSWER[0]))

    def listen(self, host: str = "127.0.0.1") -> Address:
        """Open this node's port (a free one) for its children; returns its address."""
        self._listener = socket.create_server((host, 0), backlog=self.shape.arity)
        port: int = self._listener.getsockname()[1]
        return host, port

    def connect(self, addresses: Sequence[Address]) -> None:
        """Connect to the parent and wait for the children.

        Raises StepTimeout naming who is missing, PeerLost naming a parent that is gone.
        """
        deadline = time.monotonic() + self._timeout
        parent = self.shape.parent(self.node)
        if parent is not None:
            self._connect_up(parent, addresses[parent])
        expected = set(self.shape.children(self.node))
        assert self._listener is not None, "listen first"
        while missing := expected - set(self._down):
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                child, _ = self._listener.accept()
                self._tune(child)
                name = bytearray(4)
                _receive(child, [memoryview(name)], deadline)
            except TimeoutError:
                raise self._missing(missing) from None
            except ConnectionError:
                continue
            number = int.from_bytes(name, "little")
            if number in missing:
                self._down[number] = child
            else:  # not one of ours
                child.close()
        self._listener.close()

    def allgather(self, step: int, block: bytes | memoryview) -> Gathered:
        """COLLECTIVE over nodes: everybody's block of this step, or why it is not here.

        A tree in which a node was late, or that lost its way to the root, is of no further use.
        """
        began = time.monotonic()
        self._own[:] = block
        self._states[self._own_place] = State.HERE
        for child in list(self._down):
            self._receive_subtree(step, child, began + self._children_seconds)
        if self._up is not None:
            self._exchange_with_parent(step, self._up, began + self._answer_seconds)
        for child, connection in list(self._down.items()):
            try:
                self._send(step, connection, 0, began + self._timeout)
            except OSError:
                self._miss(child, State.GONE)
        states = bytearray(len(self._order))
        for place, node in enumerate(self._order):
            states[node] = self._states[place]
        return Gathered(self._order, bytes(states), self._blocks)

    def hung_up(self) -> list[int]:
        """LOCAL: neighbours in the tree that have closed their connection. Reads nothing."""
        parent = self.shape.parent(self.node)
        neighbours = (
            dict(self._down) if parent is None or self._up is None else {parent: self._up, **self._down}
        )
        return sorted(node for node, connection in neighbours.items() if _closed(connection))

    def close(self) -> None:
        for connection in (self._listener, self._up, *self._down.values()):
            if connection is not None:
                connection.close()

    # -- inside -------------------------------------------------------------------------------

    def _connect_up(self, parent: int, address: Address) -> None:
        try:
            self._up = socket.create_connection(address, timeout=self._timeout)
            self._tune(self._up)
            self._up.sendall(self.node.to_bytes(4, "little"))
        except TimeoutError:
            raise self._missing([parent]) from None
        except OSError as error:  # it listened when it published the address
            rank = self._leaders[parent]
            raise PeerLost.in_step(step=-1, layer=-1, operation=CONNECTING, ranks=[rank]) from error

    def _missing(self, nodes: Iterable[int]) -> StepTimeout:
        ranks = sorted(self._leaders[node] for node in nodes)
        return StepTimeout(step=-1, operation=CONNECTING, ranks=ranks, seconds=self._timeout)

    def _piece(self, node: int, block_bytes: int) -> list[memoryview]:
        """States and blocks of a subtree: views into the whole."""
        start, count = self._order.index(node), len(self.shape.subtree(node))
        return [
            self._states[start : start + count],
            self._blocks[start * block_bytes : (start + count) * block_bytes],
        ]

    def _receive_subtree(self, step: int, child: int, deadline: float) -> None:
        try:
            self._receive(step, self._down[child], child, f"node {child}", deadline)
        except TimeoutError:
            self._miss(child, State.LATE)
        except OSError:
            self._miss(child, State.GONE)

    def _exchange_with_parent(self, step: int, up: socket.socket, deadline: float) -> None:
        parent = self.shape.parent(self.node)
        assert parent is not None
        try:
            self._send(step, up, self.node, deadline)
            self._receive(step, up, 0, f"node {parent}", deadline)
        except OSError as error:  # a TimeoutError is one
            below = bytes(self._pieces[self.node][0])
            self._states[:] = bytes([State.UNKNOWN]) * len(self._order)
            self._pieces[self.node][0][:] = below
            late = isinstance(error, TimeoutError)
            self._states[self._order.index(parent)] = State.LATE if late else State.GONE

    def _send(self, step: int, connection: socket.socket, subtree: int, deadline: float) -> None:
        _send(connection, [memoryview(_HEADER.pack(step)), *self._pieces[subtree]], deadline)

    def _receive(
        self, step: int, connection: socket.socket, subtree: int, sender: str, deadline: float
    ) -> None:
        _receive(connection, [self._header, *self._pieces[subtree]], deadline)
        (theirs,) = _HEADER.unpack(self._header)
        if theirs != step:
            raise PeerLost(f"{sender} is at step {theirs}, this node at step {step}")

    def _tune(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _miss(self, child: int, state: State) -> None:
        """Nothing came from a child: nobody knows of what hangs below it."""
        if state is State.GONE:
            self._down.pop(child).close()
        states, blocks = self._pieces[child]
        states[:] = bytes([state]) + bytes([State.UNKNOWN]) * (len(states) - 1)
        blocks[:] = bytes(len(blocks))


def _receive(connection: socket.socket, pieces: list[memoryview], deadline: float) -> None:
    """Fill all pieces; ConnectionError when the peer closes, TimeoutError at the deadline."""
    while pieces:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        count = connection.recvmsg_into(pieces)[0]
        if count == 0:
            raise ConnectionResetError("connection closed")
        pieces = _rest(pieces, count)


def _send(connection: socket.socket, pieces: list[memoryview], deadline: float) -> None:
    """Send all pieces, in one call unless the kernel takes only a part; TimeoutError at the deadline."""
    while pieces:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        pieces = _rest(pieces, connection.sendmsg(pieces))


def _closed(connection: socket.socket) -> bool:
    """Whether the peer has closed; a message that waits to be read says that it had not."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _rest(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of pieces after `count` bytes; empty ones are dropped."""
    left = []
    for piece in pieces:
        cut = min(count, len(piece))
        count -= cut
        if cut < len(piece):
            left.append(piece[cut:])
    return left
