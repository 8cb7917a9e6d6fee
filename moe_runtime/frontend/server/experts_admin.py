"""Admin endpoints of expert placement, loads and new weights: routes and their answers, nothing else."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from annotated_types import MinLen
from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from moe_runtime.errors import RequestRefused, UserError
from moe_runtime.frontend.experts import Experts
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.openai.schema import Body, parse
from moe_runtime.frontend.server.openapi import ANSWERS, describe


class ReloadRequest(Body):
    """The request of /admin/reload: the folder of a checkpoint."""

    path: Annotated[str, MinLen(1)]


def add_experts_admin(app: FastAPI, experts: Experts, check_weights: Callable[[Path], None]) -> None:
    """/admin/placement, /admin/rebalance, /admin/reload, /admin/expert-load/{start,stop,dump}.

    `check_weights` raises UserError for a checkpoint that cannot take the place of the one in use.
    """

    @app.get("/admin/placement", responses=ANSWERS)
    async def placement() -> Response:
        """Of every instance: the map, its epoch, last moves, newest decision, bound and gap, last reload."""
        instances = await _answered(experts.placements())
        return _json({"instances": {n: msgspec.structs.asdict(now) for n, now in instances.items()}})

    @app.post("/admin/rebalance", responses=ANSWERS)
    async def rebalance() -> Response:
        """Decide now, and move though it may not pay."""
        instances = await _answered(experts.placements())
        live = [name for name, now in instances.items() if now.live]
        if not live:
            raise ApiError(400, "no deployment of the plan has balancing.enabled", code="not_enabled")
        experts.rebalance(live)
        return _json({"status": "asked", "instances": live})

    @app.post("/admin/reload", openapi_extra=describe(ReloadRequest), responses=ANSWERS)
    async def reload(request: Request) -> Response:
        """Serve the weights of another checkpoint of the same model; answers when all ranks do, or none."""
        start = time.monotonic()
        folder = Path(parse(ReloadRequest, await request.body()).path).absolute()
        try:
            await asyncio.to_thread(check_weights, folder)
            await _answered(experts.reload(folder))
        except UserError as error:
            raise ApiError(400, str(error), param="path") from error
        except RequestRefused as error:
            raise ApiError(409, str(error), code="not_reloaded") from error
        return _json(
            {"status": "reloaded", "path": str(folder), "seconds": round(time.monotonic() - start, 3)}
        )

    @app.post("/admin/expert-load/{action}", responses=ANSWERS)
    async def expert_load(
        action: Literal["start", "stop", "dump"], deployment: Annotated[str | None, Query()] = None
    ) -> Response:
        """Count from zero, count no more, or answer the counts, which `balancing.initial` takes in a file."""
        if action != "dump":
            experts.record(action)
            return _json({"status": action})
        loads = await _answered(experts.dump())
        if deployment is None and len(loads) == 1:
            deployment = next(iter(loads))
        if deployment not in loads:
            raise ApiError(400, f"deployment: one of {', '.join(loads)}", param="deployment")
        one = loads[deployment]
        return _json({"deployment": deployment, "layers": one.layers, "load": one.pairs_LE.tolist()})


async def _answered(question: Any) -> Any:
    try:
        return await question
    except TimeoutError as error:
        raise ApiError(504, "a rank did not answer", code="timeout") from error


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
