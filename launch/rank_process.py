"""The life of one rank process: start, run, and end in a way that names what went wrong once.

The rank that fails first prints its error; ranks that fail because of it say in a line whom they
waited for, and stay a moment, so that a launcher that looks now and then sees the first one first.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from moe_runtime.engine.collectives import CollectiveTrace, writer
from moe_runtime.errors import PeerLost, PlanError, StepTimeout, UserError
from moe_runtime.launch import environment, mpi, worker
from moe_runtime.launch.console import say
from moe_runtime.launch.environment import RankEnvironment
from moe_runtime.launch.frontends import Frontends, listen
from moe_runtime.launch.parent import ParentWatch
from moe_runtime.launch.place import Place, place_of
from moe_runtime.launch.preflight import Preflight, preflight
from moe_runtime.launch.rendezvous import Rendezvous, contact
from moe_runtime.launch.sockets import make_session, remove_session

SECONDARY_DELAY = 1.0
# What a rank raises because of another one: it names the ranks that it waited for.
CONSEQUENCES = (StepTimeout, PeerLost)
POISON = "MOE_RUNTIME_POISON_KV"
COLLECTIVES = "MOE_RUNTIME_TRACE_COLLECTIVES"


def run(
    env: RankEnvironment,
    plan_path: Path,
    overrides: Sequence[str],
    argv: Sequence[str],
    *,
    parent: ParentWatch,
    trace: bool,
    serve: bool,
) -> int:
    """Run this process as a rank until its instance stops; returns the exit code.

    `argv` is the whole command line: rank 0 runs it once more as the frontend. If that is to `serve`,
    the frontends listen while the weights are read, and a signal lets what runs finish.
    """
    rank = _RankProcess(env, trace=trace, serve=serve)
    parent.last_act = rank.clean_up
    for number in (signal.SIGTERM, *([signal.SIGINT] if serve else [])):
        signal.signal(number, rank.on_signal)
    try:
        return rank.run(plan_path, overrides, argv)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the last line of defence of a process
        code = rank.fail(error)
        rank.clean_up()
        # The sockets go with the error, after a moment: an exception raised in there would be printed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return code
    finally:
        rank.clean_up()


class _RankProcess:
    def __init__(self, env: RankEnvironment, *, trace: bool, serve: bool) -> None:
        self.env = env
        # Errors name ranks by their number in the instance, which is another one if there are several.
        self.name = f"rank {env.rank}"
        self.trace = trace
        self.serve = serve
        self.rendezvous: Rendezvous | None = None
        given = os.environ.get(environment.SESSION)
        self.session = Path(given) if given else None
        self.frontends = Frontends(self._frontend_failed)
        self.finishing = False
        self.stepping = False

    def run(self, plan_path: Path, overrides: Sequence[str], argv: Sequence[str]) -> int:
        flight = preflight(plan_path, overrides, check_tensors=self.env.rank == 0)
        if self.serve:
            os.environ[environment.LOG] = flight.effective.server.log
        self._check_world(flight)
        rendezvous = self.rendezvous = Rendezvous(self.env)
        if not rendezvous.same_everywhere("plan", flight.effective.digest):
            raise PlanError("plan", f"rank {self.env.rank} has another effective plan than the first rank")
        session = self._open_session(rendezvous)
        place = place_of(flight.effective, self.env.rank)
        if len(flight.effective.instances) > 1:
            self.name += f" ({place.instance.name} rank {place.rank})"
        if self.serve and self.env.rank == 0:
            self.frontends.start(flight, session, argv, listen(flight.effective.server))
        self._join_world(rendezvous, place, flight.effective.num_ranks)
        loaded = worker.load(flight, place, self._trace_collectives(place))
        rendezvous.publish("card", worker.card(loaded, session))
        cards = rendezvous.gather("card", worker.RankCard, "loading weights")
        poison = os.environ.get(POISON) == "1"
        engine = worker.assemble(flight, loaded, cards, poison=poison, trace=self.trace)
        engine.warm_up()
        if self.env.rank == 0 and not self.serve:
            self.frontends.start(flight, session, argv)
        self.stepping = True
        engine.run()
        engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return self.frontends.wait()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Exit; the first time, if requests may be running, have the frontends let them finish instead."""
        # Our own launcher tells rank 0 alone at first; what other ranks hear of it is to end now.
        first = not self.finishing and (self.env.rank == 0 or self.env.launcher != "self")
        if not (self.serve and self.stepping and first):
            sys.exit(128 + number)
        self.finishing = True
        self.frontends.signal(signal.SIGTERM)

    def fail(self, error: BaseException) -> int:
        """Report an error that ended this rank; returns the exit code."""
        code = 2 if isinstance(error, UserError) else 1
        if isinstance(error, CONSEQUENCES):
            say(f"{self.name} ended: {type(error).__name__}: {error}")
            time.sleep(SECONDARY_DELAY)
        elif self._first_to_fail() != self.env.rank:
            first_line = (str(error).splitlines() or [""])[0]
            if not isinstance(error, UserError):  # whose message another rank has printed
                say(f"{self.name} ended: {type(error).__name__}: {first_line}")
            time.sleep(SECONDARY_DELAY)
        elif isinstance(error, UserError):
            say(f"error: {error}")
        else:
            text = "".join(traceback.format_exception(error))
            say(f"{self.name} failed:\n{text}")
        if self.env.launcher == "mpirun" and "mpi4py.MPI" in sys.modules:
            sys.stderr.flush()
            mpi.abort(code)
        return code

    def clean_up(self) -> None:
        """End the frontends that still run, and remove the sockets."""
        self.frontends.kill()
        if self.env.rank == 0:
            remove_session(self.session)

    # -- inside -------------------------------------------------------------------------------

    def _check_world(self, flight: Preflight) -> None:
        planned = flight.effective.num_ranks
        if self.env.world_size != planned:
            raise PlanError(
                "cluster",
                f"the launcher started {self.env.world_size} ranks, the deployments take {planned}",
                hint=f"start {planned} ranks",
            )

    def _open_session(self, rendezvous: Rendezvous) -> Path:
        """A directory for sockets that only this user can enter; rank 0 makes it."""
        if self.env.rank == 0:
            self.session = self.session or make_session()
            rendezvous.tell("session", str(self.session))
        return Path(rendezvous.ask("session"))

    def _join_world(self, rendezvous: Rendezvous, place: Place, ranks_on_host: int) -> None:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(int(threads) if threads.isdigit() else max(1, cores // ranks_on_host))
        if (
            place.deployment.dispatch.backend == "torch"
        ):  # nothing else needs the group, whose threads never sleep
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            with contact("the process group"):
                dist.init_process_group(
                    "gloo",
                    store=PrefixStore(place.instance.name, rendezvous.store),
                    rank=place.rank,
                    world_size=place.num_ranks,
                    timeout=timedelta(seconds=worker.STEP_TIMEOUT),
                )

    def _trace_collectives(self, place: Place) -> CollectiveTrace | None:
        """Written to a folder that must exist, one file per rank, if the environment asks for it."""
        folder = os.environ.get(COLLECTIVES)
        if not folder:
            return None
        file = (Path(folder) / f"{place.instance.name}.{place.rank}.jsonl").open("w")
        return CollectiveTrace(place.instance.name, writer(file))

    def _frontend_failed(self, code: int) -> None:
        """A frontend that fails ends the launch; it has printed why."""
        self.clean_up()
        if self.env.launcher == "mpirun":
            mpi.abort(code)
        os._exit(code)

    def _first_to_fail(self) -> int:
        """The rank whose failure counts; -1 if the store is gone with its host."""
        if self.rendezvous is None:
            return self.env.rank if self.env.rank == 0 else -1
        try:
            return self.rendezvous.first_to_fail()
        except PeerLost:
            return -1
