"""Memory shared by the processes of one host: windows, and flags to wait on without spinning.

A window is an anonymous memory file (memfd): it has no name, survives no process, and is not
limited by the size of /dev/shm. Another process of the same user opens it by (pid, fd).

Flags are 32-bit words waited on with futex(2): a writer stores data first and the flag after it,
a reader sees the flag and then the data, which total store order (x86-64) guarantees.
"""

import ctypes
import mmap
import os
import platform
import select
import time
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

CACHE_LINE = 64
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)


class WindowAddress(msgspec.Struct, frozen=True):
    """Where another process of this host and user finds a window."""

    pid: int
    fd: int
    size: int


class Window:
    """A piece of memory that several processes map. The creator keeps it alive until others opened it."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.size = size
        self.memory = mmap.mmap(fd, size)

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """A zero-filled window of `size` bytes; `name` only shows up in /proc."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, max(size, 1))
        return cls(fd, max(size, 1))

    @classmethod
    def open(cls, address: WindowAddress) -> Self:
        """Map a window of another process; OSError when that process is gone."""
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
        return cls(fd, address.size)

    @property
    def address(self) -> WindowAddress:
        return WindowAddress(os.getpid(), self._fd, self.size)

    def array(self, dtype: type[np.generic], shape: tuple[int, ...], offset: int = 0) -> NDArray[np.generic]:
        """A numpy view of the window; `offset` in bytes."""
        return np.ndarray(shape, dtype, buffer=self.memory, offset=offset)

    def close(self) -> None:
        """Close the descriptor; views keep the mapping alive until they are gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Flag:
    """One 32-bit word of a window: `set` publishes a value, `wait` blocks until it is reached."""

    def __init__(self, word: NDArray[np.generic]) -> None:
        assert word.dtype == np.int32
        assert word.size == 1
        self._word = word.reshape(1)
        self._address = ctypes.c_void_p(word.ctypes.data)

    @property
    def value(self) -> int:
        return int(self._word[0])

    def set(self, value: int) -> None:
        """Publish `value` and wake everybody who waits."""
        self._word[0] = value
        self.wake()

    def wake(self) -> None:
        """Wake everybody who waits. A full memory barrier: the kernel looks for waiters behind one."""
        _libc.syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, 2**31 - 1, None, None, 0)

    def sleep(self, seen: int, seconds: float) -> None:
        """Block while the value is `seen`, at most so long; may return early without a reason."""
        timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _libc.syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, seen, ctypes.byref(timeout), None, 0)

    def wait(self, at_least: int, deadline: float) -> bool:
        """Block until the value is >= `at_least`; False when `deadline` (time.monotonic) passes first."""
        while (seen := self.value) < at_least:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.sleep(seen, left)
        return True


class ProcessWatch:
    """Tells whether another process has ended; zombies have. Not fooled by a reused pid."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    @property
    def gone(self) -> bool:
        """True once the process has ended."""
        return self._poll(0)

    def wait(self) -> None:
        """Sleep until the process has ended."""
        self._poll(None)

    def _poll(self, milliseconds: int | None) -> bool:
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
