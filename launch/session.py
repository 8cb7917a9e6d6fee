"""How a command that needs ranks runs, in each of the three processes it may find itself in.

Started by hand it checks everything and launches the ranks; as a rank it becomes one; as the
frontend, a child of rank 0, it does the command's own work against the fleet.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from moe_runtime.files import require_outputs
from moe_runtime.frontend.bootstrap import Bootstrap
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.launch import environment, local
from moe_runtime.launch.console import say
from moe_runtime.launch.parent import ParentWatch
from moe_runtime.launch.preflight import Preflight, preflight
from moe_runtime.launch.sockets import remove_session
from moe_runtime.report.timeline import write_timeline

Work = Callable[[Preflight, Fleet], Awaitable[int]]


def run(
    plan: Path,
    overrides: Sequence[str],
    argv: Sequence[str],
    *,
    check: Callable[[Preflight], None],
    work: Work,
    inputs: Mapping[str, Path],
    outputs: Mapping[str, Path | None],
    timeline: Path | None,
    serve: bool = False,
) -> int:
    """`check` looks at the command's own inputs before any rank starts; `work` runs in the frontend.

    With `timeline`, ranks trace their steps and the trace is written there. With `serve`, `work` runs
    in every frontend and starts the fleet itself, and a signal lets it finish what runs.
    """
    if (raw := os.environ.get(environment.FRONTEND)) is not None:
        ParentWatch()
        bootstrap = msgspec.json.decode(raw, type=Bootstrap)
        flight = preflight(plan, overrides, check_tensors=False)
        if serve:
            import uvloop

            return uvloop.run(_serving(flight, bootstrap, work))
        return asyncio.run(_frontend(flight, bootstrap, work, timeline))
    env = environment.detect(os.environ)
    if env is not None:
        # From the first moment: torch takes seconds to load.
        parent = ParentWatch(lambda: remove_session(os.environ.get(environment.SESSION)))
        if env.rank == 0:
            check(preflight(plan, overrides, check_tensors=False))
        from moe_runtime.launch import rank_process

        return rank_process.run(
            env, plan, overrides, argv, parent=parent, trace=timeline is not None, serve=serve
        )
    outputs = {**outputs, "--timeline-out": timeline}
    require_outputs(outputs, {"PLAN": plan, **inputs})
    flight = preflight(plan, overrides, check_tensors=True)
    check(flight)
    if serve:
        os.environ[environment.LOG] = flight.effective.server.log
    return local.launch(argv, flight.effective.num_ranks, serve=serve)


async def _frontend(flight: Preflight, bootstrap: Bootstrap, work: Work, timeline: Path | None) -> int:
    fleet = Fleet(bootstrap)
    await fleet.start(on_wait=lambda missing: say(f"waiting for {', '.join(missing)}"))
    try:
        code = await work(flight, fleet)
        if timeline is not None:
            await fleet.collect()
            write_timeline(timeline, fleet.timelines)
            say(f"wrote {timeline}")
        return code
    finally:
        await fleet.shutdown()


async def _serving(flight: Preflight, bootstrap: Bootstrap, work: Work) -> int:
    fleet = Fleet(bootstrap, bounded=True)
    try:
        return await work(flight, fleet)
    finally:
        await fleet.shutdown()
