"""Ranks that run as threads of the test: real engines, sockets and transfers, no launch."""

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moe_runtime.engine.messages import Status
from moe_runtime.engine.rank import RankEngine
from moe_runtime.engine.sockets import ipc_address
from moe_runtime.frontend.bootstrap import Bootstrap, RankAddress
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.frontend.live import Live
from moe_runtime.launch import worker
from moe_runtime.launch.place import place_of
from moe_runtime.launch.preflight import preflight
from moe_runtime.launch.sockets import make_session
from moe_runtime.spec.requests import SamplingParams
from tests.end_to_end.commands import write_plan

STATUS_SECONDS = 0.02


@dataclass
class InProcess:
    """`engines` by deployment, those of later ranks by `name_of`; `statuses` are the newest of each."""

    engines: dict[str, RankEngine]
    fleet: Fleet
    statuses: dict[str, Status] = field(default_factory=dict)

    def submit(self, prompt: list[int], max_tokens: int, **more) -> Live:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.fleet.submit(prompt, params, **more)

    async def until(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait for something; returns how long it took."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, f"{what}: not within {seconds} s: {self.statuses}"
            await asyncio.sleep(0.005)
        return time.monotonic() - start

    def at_baseline(self) -> bool:
        """No rank holds anything, as far as it said."""
        return all(
            (s.waiting, s.running, s.pulling, s.kv_used) == (0, 0, 0, 0) for s in self.statuses.values()
        )


@contextmanager
def ranks(
    tmp_path: Path, checkpoint: Path, deployments: dict, overrides: Sequence[str] = ()
) -> Iterator[tuple[dict[str, RankEngine], Bootstrap]]:
    """Load and run the ranks of all deployments until the frontend of the bootstrap has left."""
    plan = write_plan(tmp_path / "plan.yaml", checkpoint, deployments)
    flight = preflight(plan, overrides, check_tensors=False)
    session = make_session()
    loaded = [
        worker.load(flight, place_of(flight.effective, rank)) for rank in range(flight.effective.num_ranks)
    ]
    cards = [worker.card(one, session) for one in loaded]
    engines: dict[str, RankEngine] = {
        name_of(one.place.deployment.name, one.place.rank): worker.assemble(
            flight, one, cards, poison=True, trace=False
        )
        for one in loaded
    }
    addresses = [
        RankAddress(
            instance=c.instance,
            deployment=c.deployment,
            rank=c.rank,
            address=c.inbox,
            kv_tokens=1 << 20,
            max_sequences=1 << 20,
        )
        for c in cards
    ]
    bootstrap = Bootstrap(
        frontend=0, frontends=1, address=ipc_address(session, "frontend.0"), ranks=addresses
    )
    threads = [threading.Thread(target=_run, args=(engine,), daemon=True) for engine in engines.values()]
    for thread in threads:
        thread.start()
    try:
        yield engines, bootstrap
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a rank did not stop after its frontend left"
    finally:
        shutil.rmtree(session, ignore_errors=True)


def name_of(deployment: str, rank: int) -> str:
    """What a rank of the only instance of its deployment is called here."""
    return f"{deployment} {rank}" if rank else deployment


def _run(engine: RankEngine) -> None:
    engine.run()
    engine.close()


@asynccontextmanager
async def running(engines: dict[str, RankEngine], bootstrap: Bootstrap) -> AsyncIterator[InProcess]:
    """The fleet of ranks that run, following their statuses."""
    fleet = Fleet(bootstrap)
    launch = InProcess(engines, fleet)
    await fleet.start()
    fleet.watch(
        STATUS_SECONDS,
        lambda status, now: launch.statuses.update({name_of(status.deployment, status.rank): status}),
    )
    await launch.until(lambda: len(launch.statuses) == len(engines), 5, "first statuses")
    try:
        yield launch
        fleet.raise_if_failed()
    finally:
        await fleet.shutdown()
