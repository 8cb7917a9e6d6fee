"""The one place that touches mpi4py: a bootstrap channel, and a way to end all ranks at once."""

from typing import Any

from moe_runtime.errors import UnavailableError


def world() -> Any:
    """MPI.COMM_WORLD; UnavailableError without mpi4py."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UnavailableError("mpi4py", "running under mpirun", "mpi") from None
    return MPI.COMM_WORLD


def abort(code: int) -> None:
    """End every rank of the job; does not return. After a plain exit the others would wait for a minute."""
    world().Abort(code)
