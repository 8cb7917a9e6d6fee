"""All-gather of small fixed-size blocks over a tree of node leaders, by TCP. No torch.

Leaders form a k-ary tree (children of i are k*i+1 .. k*i+k). Blocks travel up, each node adding
its own, and the whole comes down: 2 * depth hops, 2 * (N - 1) messages. Everything has a fixed
size, so a message is a header and one array; nothing is parsed.

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

_HEADER = struct.Struct("<qq")  # step, number of missing nodes in this message
Address = tuple[str, int]


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
        """The node and all below it, in the order in which their blocks travel."""
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
        self._block = block_bytes
        self._timeout = timeout
        self._listener: socket.socket | None = None
        self._up: socket.socket | None = None
        self._down: dict[int, socket.socket] = {}
        self.missing: set[int] = set()

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
        while expected - set(self._down):
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                child, _ = self._listener.accept()
            except TimeoutError:
                self._raise_timeout(-1, "connecting the agreement tree", sorted(expected - set(self._down)))
            self._tune(child)
            self._down[int.from_bytes(self._receive(child, 4), "little")] = child
        self._listener.close()

    def allgather(self, step: int, block: bytes) -> list[bytes | None]:
        """COLLECTIVE over nodes: everybody's block of this step, None for nodes that are gone.

        Raises StepTimeout (a node is silent) and PeerLost (the way to the root is gone).
        """
        assert len(block) == self._block
        gathered = self._gather(step, block)
        if self._up is None:
            whole = self._encode(step, gathered, range(self.shape.num_nodes))
        else:
            whole = self._exchange_with_parent(step, gathered)
        for child, connection in list(self._down.items()):
            try:
                connection.sendall(whole)
            except OSError:
                self._lose(child)
        blocks = self._decode(step, whole, range(self.shape.num_nodes), "root")
        self.missing = {n for n in range(self.shape.num_nodes) if n not in blocks}
        return [blocks.get(n) for n in range(self.shape.num_nodes)]

    def close(self) -> None:
        for connection in (self._listener, self._up, *self._down.values()):
            if connection is not None:
                connection.close()

    # -- inside -------------------------------------------------------------------------------

    def _gather(self, step: int, block: bytes) -> dict[int, bytes]:
        gathered = {self.node: block}
        for child, connection in list(self._down.items()):
            nodes = self.shape.subtree(child)
            try:
                message = self._receive(connection, self._size(len(nodes)))
            except TimeoutError:
                self._raise_timeout(step, "agreement", nodes)
            except OSError:
                self._lose(child)
                continue
            gathered.update(self._decode(step, message, nodes, f"node {child}"))
        return gathered

    def _exchange_with_parent(self, step: int, gathered: dict[int, bytes]) -> bytes:
        assert self._up is not None
        parent = self.shape.parent(self.node)
        try:
            self._up.sendall(self._encode(step, gathered, self.shape.subtree(self.node)))
            return self._receive(self._up, self._size(self.shape.num_nodes))
        except TimeoutError:
            self._raise_timeout(step, "agreement", [n for n in range(self.shape.num_nodes) if n != self.node])
        except OSError as error:
            raise PeerLost(
                f"step {step}: node {parent} is gone, and with it the way to the others"
            ) from error

    def _size(self, nodes: int) -> int:
        return _HEADER.size + nodes * (1 + self._block)

    def _encode(self, step: int, blocks: dict[int, bytes], nodes: Sequence[int]) -> bytes:
        present = bytes(n in blocks for n in nodes)
        empty = bytes(self._block)
        missing = len(nodes) - sum(present)
        return b"".join((_HEADER.pack(step, missing), present, *(blocks.get(n, empty) for n in nodes)))

    def _decode(self, step: int, message: bytes, nodes: Sequence[int], sender: str) -> dict[int, bytes]:
        theirs, _ = _HEADER.unpack_from(message)
        if theirs != step:
            raise PeerLost(f"{sender} is at step {theirs}, this node at step {step}")
        present, start = message[_HEADER.size : _HEADER.size + len(nodes)], _HEADER.size + len(nodes)
        cut = memoryview(message)
        return {
            n: bytes(cut[start + i * self._block : start + (i + 1) * self._block])
            for i, n in enumerate(nodes)
            if present[i]
        }

    def _receive(self, connection: socket.socket, size: int) -> bytes:
        """Exactly `size` bytes; ConnectionError when the peer closes, TimeoutError when it is silent."""
        buffer = bytearray(size)
        view, got = memoryview(buffer), 0
        while got < size:
            count = connection.recv_into(view[got:])
            if count == 0:
                raise ConnectionResetError("connection closed")
            got += count
        return bytes(buffer)

    def _tune(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._timeout)

    def _lose(self, child: int) -> None:
        self._down.pop(child).close()

    def _raise_timeout(self, step: int, operation: str, nodes: Sequence[int]) -> NoReturn:
        raise StepTimeout(step=step, operation=f"{operation} of nodes", ranks=nodes, seconds=self._timeout)
