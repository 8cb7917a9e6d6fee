"""Who started this process, and as which rank: torchrun, mpirun, our own launcher, or nobody.

Pure functions of an environment mapping; nothing is imported or contacted here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moe_runtime.errors import InputError

RANK = "MOE_RUNTIME_RANK"
WORLD = "MOE_RUNTIME_WORLD_SIZE"
PORT = "MOE_RUNTIME_STORE_PORT"
LISTEN_FD = "MOE_RUNTIME_STORE_FD"
FRONTEND = "MOE_RUNTIME_FRONTEND"
PARENT = "MOE_RUNTIME_PARENT"
SESSION = "MOE_RUNTIME_SESSION"
SERVE_FD = "MOE_RUNTIME_SERVE_FD"
LOG = "MOE_RUNTIME_LOG"  # json: every process of the launch says what it has to say as lines of JSON
# Sizes that other launchers set: MPICH, Slurm, PMIx without Open MPI.
FOREIGN = ("PMI_SIZE", "SLURM_NTASKS", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """This process is rank `rank` of `world_size`, started by `launcher`.

    `attempt` counts restarts by the launcher, so that a restarted world never meets keys of the old one.
    """

    launcher: Literal["self", "torchrun", "mpirun"]
    rank: int
    world_size: int
    store_host: str = "127.0.0.1"
    store_port: int = 0
    store_fd: int | None = None
    agent_store: bool = False
    attempt: int = 0


def detect(env: Mapping[str, str]) -> RankEnvironment | None:
    """The rank this process is, or None when it was started by hand.

    Raises InputError when a launcher's variables are incomplete.
    """
    if RANK in env:
        fd = env.get(LISTEN_FD)
        return RankEnvironment(
            launcher="self",
            rank=int(env[RANK]),
            world_size=int(env[WORLD]),
            store_port=int(env[PORT]),
            store_fd=int(fd) if fd else None,
        )
    if "TORCHELASTIC_RUN_ID" in env:
        _require_one_host(env, "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        return RankEnvironment(
            launcher="torchrun",
            rank=_number(env, "RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            store_host=env.get("MASTER_ADDR", "127.0.0.1"),
            store_port=_port(env, "MASTER_PORT"),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        _require_one_host(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE")
        return RankEnvironment(
            launcher="mpirun",
            rank=_number(env, "OMPI_COMM_WORLD_RANK"),
            world_size=_number(env, "OMPI_COMM_WORLD_SIZE"),
        )
    for name in FOREIGN:
        if env.get(name, "1") not in ("", "1"):
            raise InputError(
                f"one of several processes of a launcher that is not known ({name} is {env[name]});"
                " use torchrun, Open MPI's mpirun, or neither"
            )
    return None


def _require_one_host(env: Mapping[str, str], local: str, world: str) -> None:
    if env.get(local, env.get(world)) != env.get(world):
        raise InputError(
            f"several hosts are not available in this version: {env[local]} of {env[world]} ranks are on"
            " this one"
        )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except (KeyError, ValueError):
        raise InputError(f"the launcher set {name} to {env.get(name)!r}; a number is needed") from None


def _port(env: Mapping[str, str], name: str) -> int:
    port = _number(env, name)
    if not 0 < port < 65536:
        raise InputError(f"the launcher set {name} to {port}; use a real port, or torchrun --standalone")
    return port
