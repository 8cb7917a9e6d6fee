"""All-gather of small fixed-size blocks over a tree of node leaders, by TCP. No torch.

Leaders form a k-ary tree (children of i are k*i+1 .. k*i+k). Blocks travel up, each node adding
its own, and the whole comes down: 2 * depth hops, 2 * (N - 1) messages. Blocks lie in preorder, so
a subtree is one piece of the buffer: it is received in place and sent from there, never parsed.
A message is a header, one presence byte per node, and the blocks.

A node whose connection breaks, and what hangs below it, is reported as missing from then on; a
node that loses its way to the root raises PeerLost. N nodes, B bytes per block.
"""

import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from moe_runtime.errors import PeerLost, StepTimeout

_HEADER = struct.Struct("<q")  # step
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Gathered:
    """All blocks of a step. `blocks` is valid until the next `allgather`.

    present  bytes [N]: 1 where the node's block is here; by node number
    blocks   [N * B] in the order `order` of node numbers
    """

    order: tuple[int, ...]
    present: bytes
    blocks: memoryview

    def block(self, node: int) -> memoryview | None:
        """The block of a node, None if it is gone."""
        if not self.present[node]:
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
        hops, node = 0, self.num_nodes - 1
        while (up := self.parent(node)) is not None:
            hops, node = hops + 1, up
        return hops


class NodeTree:
    """One leader's place in the tree. Use: `listen`, publish the address, `connect`, `allgather` per step."""

    def __init__(self, node: int, shape: TreeShape, *, block_bytes: int, timeout: float) -> None:
        self.node = node
        self.shape = shape
        self._timeout = timeout
        self._listener: socket.socket | None = None
        self._up: socket.socket | None = None
        self._down: dict[int, socket.socket] = {}
        order = self._order = tuple(shape.subtree(0))
        self._header = memoryview(bytearray(_HEADER.size))
        self._present = memoryview(bytearray(len(order)))
        self._blocks = memoryview(bytearray(len(order) * block_bytes))
        self._pieces = {n: self._piece(n, block_bytes) for n in (0, node, *shape.children(node))}
        place = order.index(node)
        self._own = self._blocks[place * block_bytes : (place + 1) * block_bytes]
        self._own_place = place

    def listen(self, host: str = "127.0.0.1") -> Address:
        """Open this node's port (a free one) for its children; returns its address."""
        self._listener = socket.create_server((host, 0), backlog=self.shape.arity)
        port: int = self._listener.getsockname()[1]
        return host, port

    def connect(self, addresses: Sequence[Address]) -> None:
        """Connect to the parent and wait for the children; raises StepTimeout naming who is missing."""
        deadline = time.monotonic() + self._timeout
        parent = self.shape.parent(self.node)
        if parent is not None:
            self._up = socket.create_connection(addresses[parent], timeout=self._timeout)
            self._tune(self._up)
            self._up.sendall(self.node.to_bytes(4, "little"))
        expected = set(self.shape.children(self.node))
        assert self._listener is not None, "listen first"
        while missing := expected - set(self._down):
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                child, _ = self._listener.accept()
            except TimeoutError:
                self._raise_timeout(-1, "connecting the agreement tree", sorted(missing))
            self._tune(child)
            name = bytearray(4)
            _receive(child, [memoryview(name)])
            self._down[int.from_bytes(name, "little")] = child
        self._listener.close()

    def allgather(self, step: int, block: bytes | memoryview) -> Gathered:
        """COLLECTIVE over nodes: everybody's block of this step.

        Raises StepTimeout (a node is silent) and PeerLost (the way to the root is gone).
        """
        self._own[:] = block
        self._present[self._own_place] = 1
        for child in list(self._down):
            self._receive_subtree(step, child)
        if self._up is not None:
            self._exchange_with_parent(step, self._up)
        for child, connection in list(self._down.items()):
            try:
                self._send(step, connection, 0)
            except OSError:
                self._lose(child)
        present = bytearray(len(self._order))
        for place, node in enumerate(self._order):
            present[node] = self._present[place]
        return Gathered(self._order, bytes(present), self._blocks)

    def close(self) -> None:
        for connection in (self._listener, self._up, *self._down.values()):
            if connection is not None:
                connection.close()

    # -- inside -------------------------------------------------------------------------------

    def _piece(self, node: int, block_bytes: int) -> list[memoryview]:
        """Presence bytes and blocks of a subtree: views into the whole."""
        start, count = self._order.index(node), len(self.shape.subtree(node))
        return [
            self._present[start : start + count],
            self._blocks[start * block_bytes : (start + count) * block_bytes],
        ]

    def _receive_subtree(self, step: int, child: int) -> None:
        try:
            self._receive(step, self._down[child], child, f"node {child}")
        except TimeoutError:
            self._raise_timeout(step, "agreement", self.shape.subtree(child))
        except OSError:
            self._lose(child)

    def _exchange_with_parent(self, step: int, up: socket.socket) -> None:
        parent = self.shape.parent(self.node)
        try:
            self._send(step, up, self.node)
            self._receive(step, up, 0, f"node {parent}")
        except TimeoutError:
            self._raise_timeout(step, "agreement", [n for n in sorted(self._order) if n != self.node])
        except OSError as error:
            raise PeerLost(
                f"step {step}: node {parent} is gone, and with it the way to the others"
            ) from error

    def _send(self, step: int, connection: socket.socket, subtree: int) -> None:
        _send(connection, [memoryview(_HEADER.pack(step)), *self._pieces[subtree]])

    def _receive(self, step: int, connection: socket.socket, subtree: int, sender: str) -> None:
        _receive(connection, [self._header, *self._pieces[subtree]])
        (theirs,) = _HEADER.unpack(self._header)
        if theirs != step:
            raise PeerLost(f"{sender} is at step {theirs}, this node at step {step}")

    def _tune(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._timeout)

    def _lose(self, child: int) -> None:
        """What hangs below the child is missing from now on."""
        self._down.pop(child).close()
        present, blocks = self._pieces[child]
        present[:] = bytes(len(present))
        blocks[:] = bytes(len(blocks))

    def _raise_timeout(self, step: int, operation: str, nodes: Sequence[int]) -> NoReturn:
        raise StepTimeout(step=step, operation=f"{operation} of nodes", ranks=nodes, seconds=self._timeout)


def _receive(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Fill all pieces; ConnectionError when the peer closes, TimeoutError when it is silent."""
    while pieces:
        count = connection.recvmsg_into(pieces)[0]
        if count == 0:
            raise ConnectionResetError("connection closed")
        pieces = _rest(pieces, count)


def _send(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Send all pieces, in one call unless the kernel takes only a part."""
    while pieces:
        pieces = _rest(pieces, connection.sendmsg(pieces))


def _rest(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of pieces after `count` bytes; empty ones are dropped."""
    left = []
    for piece in pieces:
        cut = min(count, len(piece))
        count -= cut
        if cut < len(piece):
            left.append(piece[cut:])
    return left
