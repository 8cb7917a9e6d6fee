"""The launcher's store: used at start-up only, to learn addresses and to agree on the plan.

Every key lives under a prefix with the restart count, so a restarted world never meets old keys.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moe_runtime.errors import PeerLost
from moe_runtime.launch.environment import RankEnvironment

START_TIMEOUT = 600.0
REPORT_EVERY = 5.0
T = TypeVar("T")


class Rendezvous:
    """This rank's view of the store."""

    def __init__(self, env: RankEnvironment) -> None:
        self.env = env
        with contact("the launch"):
            store = _open_mpi(env) if env.launcher == "mpirun" else _open(env)
        self.store: Store = PrefixStore(f"/moe_runtime/attempt_{env.attempt}", store)

    def publish(self, key: str, value: object) -> None:
        """Make a value (anything msgspec can encode) known to all ranks under (key, this rank)."""
        self.tell(f"{key}/{self.env.rank}", msgspec.json.encode(value).decode())

    def tell(self, key: str, value: str) -> None:
        """Set a key for everybody; PeerLost without the store."""
        with contact("the launch"):
            self.store.set(key, value)

    def ask(self, key: str) -> str:
        """Wait until somebody has told `key`; PeerLost without the store, or after `START_TIMEOUT`."""
        with contact("the launch"):
            return self.store.get(key).decode()

    def gather(self, key: str, value_type: type[T], phase: str) -> list[T]:
        """COLLECTIVE: what every rank published under `key`, in rank order.

        Rank 0 says every few seconds which ranks it still waits for; PeerLost after `START_TIMEOUT`
        seconds.
        """
        deadline = time.monotonic() + START_TIMEOUT
        missing = list(range(self.env.world_size))
        values: dict[int, T] = {}
        report_at = time.monotonic() + REPORT_EVERY
        while missing:
            for rank in list(missing):
                with contact("the launch"):
                    here = self.store.check([f"{key}/{rank}"])
                if here:
                    values[rank] = msgspec.json.decode(self.ask(f"{key}/{rank}"), type=value_type)
                    missing.remove(rank)
            now = time.monotonic()
            if missing and now > deadline:
                raise PeerLost(f"{phase}: ranks {missing} did not arrive within {START_TIMEOUT:.0f} s")
            if missing and now > report_at and self.env.rank == 0:
                from moe_runtime.launch.console import say

                say(f"{phase}: waiting for ranks {missing}")
                report_at = now + REPORT_EVERY
            if missing:
                time.sleep(0.01)
        return [values[r] for r in range(self.env.world_size)]

    def first_to_fail(self) -> int:
        """Claim to be the first rank that failed; returns the rank that really was."""
        with contact("the launch"):
            return int(self.store.compare_set("first_failure", "", str(self.env.rank)).decode())

    def same_everywhere(self, key: str, value: str) -> bool:
        """True if no rank has published another value under `key`."""
        with contact("the launch"):
            return bool(self.store.compare_set(key, "", value).decode() == value)


@contextmanager
def contact(with_what: str) -> Iterator[None]:
    """What torch raises in here when a store or a peer cannot be reached becomes PeerLost."""
    try:
        yield
    except RuntimeError as error:  # DistError of the store is one; gloo's full mesh has no class of its own
        first_line = (str(error).splitlines() or [""])[0]
        raise PeerLost(f"lost contact to {with_what}: {first_line}") from error


@contextmanager
def opening(what: str, rank: int) -> Iterator[None]:
    """An OSError in here, as of a window whose maker has ended since it published it, becomes PeerLost."""
    try:
        yield
    except OSError as error:
        raise PeerLost(f"rank {rank} is gone: its {what} cannot be opened: {error}") from error


def _open(env: RankEnvironment) -> Store:
    return TCPStore(
        env.store_host,
        env.store_port,
        env.world_size,
        is_master=env.rank == 0 and not env.agent_store,
        timeout=timedelta(seconds=START_TIMEOUT),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=env.store_fd,
    )


def _open_mpi(env: RankEnvironment) -> Store:
    """Rank 0 opens a store on a free port and tells the others over MPI."""
    from moe_runtime.launch.mpi import world

    comm = world()
    host = "127.0.0.1"
    if env.rank == 0:
        # A store that opens its own port listens on every interface.
        listener = socket.create_server((host, 0))
        port = comm.bcast(listener.getsockname()[1], root=0)
        fd = listener.detach()
        return TCPStore(
            host, port, env.world_size, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
    port = comm.bcast(None, root=0)
    return TCPStore(host, port, env.world_size, is_master=False, wait_for_workers=False)
