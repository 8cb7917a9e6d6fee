"""Inbox and outbox: one PULL socket per process, PUSH sockets to whoever it talks to.

On one host the sockets lie in a private directory; nothing listens on a network port.
"""

import os
from collections.abc import Container
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

Message = TypeVar("Message")
HIGH_WATER = 0  # never drop, never block: the sender's memory is the queue


def ipc_address(directory: Path, name: str) -> str:
    """A socket address inside a directory that only this user can enter.

    The kernel limits such paths to 107 bytes.
    """
    address = f"ipc://{directory / name}"
    assert len(os.fsencode(str(directory / name))) <= 107, f"socket path too long: {address}"
    return address


class Inbox(Generic[Message]):
    """Messages to this process, decoded and type-checked."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, message_type: object) -> None:
        self.address = address
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)

    def drain(self) -> list[Message]:
        """All messages that are there, in order of arrival; never blocks."""
        messages: list[Message] = []
        while True:
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(raw))

    def wait(self, seconds: float) -> bool:
        """Block until a message is there; False after `seconds`."""
        return bool(self._socket.poll(int(seconds * 1000)))

    def close(self) -> None:
        self._socket.close()


class Outbox:
    """PUSH sockets by address, opened at first use."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", linger_ms: int = 2000) -> None:
        self._context = context
        self._linger = linger_ms
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, address: str, message: msgspec.Struct) -> None:
        """Queue a message; a peer that is gone keeps it queued until `close`."""
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(HIGH_WATER)
            socket.setsockopt(zmq.LINGER, self._linger)
            socket.connect(address)
            self._sockets[address] = socket
        socket.send(self._encoder.encode(message))

    def close(self, unwanted: Container[str] = ()) -> None:
        """Give what is queued a moment to leave, but not for addresses where it is `unwanted` by now."""
        for address, socket in self._sockets.items():
            socket.close(linger=0 if address in unwanted else None)
