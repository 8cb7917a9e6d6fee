"""How the double's ranks reach each other: lists of tensors through a mailbox on shared memory.

Owns the encoding and the group object that takes the place of a torch process group; knows nothing
of experts. Works between the threads of a process and between processes.

    area of a rank   stamp (16 bytes): transfer + 1 | int64 [R, 2]: offset and count of tensors of the
                     message to each rank | messages
    a message        per tensor int64 [8]: dtype code, dimensions, sizes (0 padded) | its bytes, padded to 16
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.expert_parallel.mailbox import Mailbox, Transfer
from tests.expert_parallel.deepep.double.contracts import require

_DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.int32,
    torch.int64,
)
_HEAD = 64
_PAD = 16


class DoubleGroup:
    """LOCAL: this rank's end of the exchange; `rank` and `size` are what DeepEP asks a group for."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def rank(self) -> int:
        return self.mailbox.rank

    def size(self) -> int:
        return self.mailbox.num_ranks

    def send(self, operation: str, messages: Sequence[Sequence[Tensor]]) -> "Arrival":
        """COLLECTIVE: one message per rank, the own one included. Does not wait."""
        transfer = self.mailbox.begin(operation)
        _write(transfer.areas[self.rank()], messages, stamp=transfer.sequence + 1)
        transfer.post()
        return Arrival(self, transfer)


class Arrival:
    """The messages of one transfer on their way to this rank."""

    def __init__(self, group: DoubleGroup, transfer: Transfer) -> None:
        self._group, self._transfer = group, transfer

    def receive(self, *, without: frozenset[int] = frozenset()) -> list[list[Tensor] | None]:
        """COLLECTIVE: a message per source rank, None for those in `without`. Call once.

        StepTimeout and PeerLost of the mailbox pass through; the transfer can be received again then.
        """
        mailbox = self._group.mailbox
        for rank in range(mailbox.num_ranks):
            mailbox.alive[rank] = rank not in without
        self._transfer.wait()
        messages = [
            None if r in without else _read(self._transfer.areas[r], mailbox.rank)
            for r in range(mailbox.num_ranks)
        ]
        self._transfer.finish()
        return messages

    def silent(self) -> frozenset[int]:
        """Ranks that have not sent yet."""
        stamps = self._transfer.areas[:, :8].copy().view(np.int64)[:, 0]
        return frozenset(np.flatnonzero(stamps != self._transfer.sequence + 1).tolist())


def _write(area: NDArray[np.uint8], messages: Sequence[Sequence[Tensor]], *, stamp: int) -> None:
    index = np.zeros((len(messages), 2), np.int64)
    at = _PAD + index.nbytes
    for rank, message in enumerate(messages):
        index[rank] = at, len(message)
        for value in message:
            head = np.zeros(8, np.int64)
            head[:2] = _DTYPES.index(value.dtype), value.dim()
            head[2 : 2 + value.dim()] = value.shape
            raw = _bytes(value)
            require(at + _HEAD + raw.size <= area.size, f"a rank's area of {area.size} bytes is too small")
            area[at : at + _HEAD] = head.view(np.uint8)
            area[at + _HEAD : at + _HEAD + raw.size] = raw
            at += _HEAD + -(-raw.size // _PAD) * _PAD
    area[_PAD : _PAD + index.nbytes] = index.view(np.uint8).ravel()
    area[:8] = np.array([stamp], np.int64).view(np.uint8)


def _bytes(value: Tensor) -> NDArray[np.uint8]:
    if not value.numel():
        return np.empty(0, np.uint8)
    raw: NDArray[np.uint8] = value.contiguous().view(-1).view(torch.uint8).numpy()
    return raw


def _read(area: NDArray[np.uint8], rank: int) -> list[Tensor]:
    entry = _PAD + rank * 16
    at, count = (int(v) for v in area[entry : entry + 16].view(np.int64))
    message = []
    for _ in range(count):
        head = area[at : at + _HEAD].view(np.int64)
        dtype, shape = _DTYPES[int(head[0])], tuple(int(n) for n in head[2 : 2 + int(head[1])])
        size = int(np.prod(shape)) * dtype.itemsize
        raw = torch.from_numpy(area[at + _HEAD : at + _HEAD + size].copy())
        message.append(raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype))
        at += _HEAD + -(-size // _PAD) * _PAD
    return message
