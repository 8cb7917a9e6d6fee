"""What frontends ask about experts: sums of all ranks by the model's layers, over sockets and over HTTP."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.balancing.wire import (
    BalancingStatus,
    FinishReload,
    RecordedLoads,
    Reload,
    ReloadAnswer,
    ReloadState,
    ToFrontendBalancing,
)
from moe_runtime.eplb.load_files import read_load
from moe_runtime.errors import RequestRefused
from moe_runtime.frontend.balancing_metrics import balancing_metrics
from moe_runtime.frontend.board import Board
from moe_runtime.frontend.experts import ExpertLoads, Experts, summed, write_loads
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.server.experts_admin import add_experts_admin
from moe_runtime.models.families.registry import read_spec
from tests.engine.in_process import InProcess, ranks, running
from tests.frontend.test_metrics import status

PROMPT, OUTPUT = 20, 6


def test_loads_are_summed_by_deployment():
    def part(deployment: str, rank: int, pairs: list[list[int]]) -> RecordedLoads:
        data = np.array(pairs, np.int64).tobytes()
        return RecordedLoads(
            instance=f"{deployment}-0", deployment=deployment, rank=rank, layers=[1, 2], pairs=data
        )

    parts = [
        part("prefill", 0, [[1, 2], [3, 4]]),
        part("decode", 0, [[5, 0], [0, 5]]),
        part("prefill", 1, [[10, 20], [30, 40]]),
    ]
    loads = summed(parts)
    assert loads["prefill"].pairs_LE.tolist() == [[11, 22], [33, 44]]
    assert loads["decode"].pairs_LE.tolist() == [[5, 0], [0, 5]]


def test_files_are_what_placements_are_made_from(tmp_path):
    one = ExpertLoads(layers=(1, 2), pairs_LE=np.array([[5, 1], [2, 3]]))
    assert write_loads(tmp_path / "F.npz", {"unified": one}) == [tmp_path / "F.npz"]
    assert read_load(tmp_path / "F.npz").tolist() == [[5, 1], [2, 3]]
    both = write_loads(tmp_path / "G.npz", {"prefill": one, "decode": one})
    assert [p.name for p in both] == ["G.prefill.npz", "G.decode.npz"]
    with np.load(both[1]) as data:
        assert data["layers"].tolist() == [1, 2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "tiny"
    make_checkpoint(folder, family="deepseek_v3", size="tiny")
    return folder


def test_every_token_is_counted_once_where_it_ran(tmp_path, checkpoint):
    spec = read_spec(checkpoint)
    per_token = spec.moe.router.top_k

    async def ask(client: httpx.AsyncClient, method: str, path: str) -> tuple[int, Any]:
        answer = await client.request(method, f"http://test{path}")
        return answer.status_code, answer.json()

    async def work(launch: InProcess) -> dict[str, Any]:
        app = FastAPI()
        add_experts_admin(app, Experts(launch.fleet), lambda path: None)

        @app.exception_handler(ApiError)
        async def refused(request: object, error: Exception) -> httpx.Response:
            assert isinstance(error, ApiError)
            from fastapi.responses import Response

            return Response(error.body, error.status)  # type: ignore[return-value]

        found: dict[str, Any] = {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            await launch.submit(list(range(8, 8 + PROMPT)), OUTPUT).done.wait()
            for name in ("prefill", "decode"):
                code, found[name] = await ask(client, "POST", f"/admin/expert-load/dump?deployment={name}")
                assert code == 200
            await ask(client, "POST", "/admin/expert-load/start")
            _, found["restarted"] = await ask(client, "POST", "/admin/expert-load/dump?deployment=decode")
            found["which"] = await ask(client, "POST", "/admin/expert-load/dump")
            found["placement"] = await ask(client, "GET", "/admin/placement")
            found["rebalance"] = await ask(client, "POST", "/admin/rebalance")
            found["unknown"] = await ask(client, "POST", "/admin/expert-load/forget")
        return found

    async def main(engines: Any, bootstrap: Any) -> dict[str, Any]:
        async with running(engines, bootstrap) as launch:
            return await work(launch)

    with ranks(tmp_path, checkpoint, {"prefill": {}, "decode": {}}) as (engines, bootstrap):
        found = asyncio.run(main(engines, bootstrap))
    prefill, decode = found["prefill"], found["decode"]
    assert prefill["layers"] == decode["layers"] == list(spec.moe_layers)
    assert np.array(prefill["load"]).sum(axis=1).tolist() == [PROMPT * per_token] * spec.num_moe_layers
    # The first token comes from prefill, and the last one is not run.
    assert np.array(decode["load"]).sum(axis=1).tolist() == [(OUTPUT - 1) * per_token] * spec.num_moe_layers
    assert np.array(found["restarted"]["load"]).sum() == 0
    assert found["which"][0] == 400
    code, placement = found["placement"]
    assert code == 200
    assert set(placement["instances"]) == {"prefill-0", "decode-0"}
    assert placement["instances"]["decode-0"]["slot_to_expert"][0] == list(range(spec.moe.num_experts))
    assert found["rebalance"][0] == 400
    assert "balancing.enabled" in found["rebalance"][1]["error"]["message"]
    assert found["unknown"][0] == 422


class Told:
    """A fleet of two instances, whose ranks say what they are made to say."""

    number, ranks = 1, (("prefill-0", 0), ("decode-0", 0))

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.told: list[Any] = []
        self.on_experts: Callable[[ToFrontendBalancing], None] | None = None

    def tell(self, rank: tuple[str, int], message: Any) -> None:
        self.told.append(message)

    def say(self, state: ReloadState, instance: int, why: str = "") -> None:
        """As one of the instances' rank."""
        (version,) = {m.version for m in self.told}
        name, rank = self.ranks[instance]
        assert self.on_experts is not None
        self.on_experts(ReloadAnswer(instance=name, rank=rank, version=version, state=state, why=why))

    @property
    def ends(self) -> list[bool]:
        return [m.commit for m in self.told if isinstance(m, FinishReload)]


async def begun(told: Told) -> asyncio.Task[None]:
    """A reload of which all ranks have heard."""
    task = asyncio.create_task(Experts(told).reload(Path("/new")))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert [type(m) for m in told.told] == [Reload, Reload]
    return task


def test_a_reload_commits_when_all_instances_have_read_it_and_only_then():
    async def main() -> None:
        told = Told()
        task = await begun(told)
        told.say("staged", 0)
        await asyncio.sleep(0.01)
        assert told.ends == []
        told.say("staged", 1)
        await asyncio.sleep(0.01)
        assert told.ends == [True, True]
        told.say("in use", 0)
        await asyncio.sleep(0.01)
        assert not task.done()
        told.say("in use", 1)
        await task

    asyncio.run(main())


def test_a_reload_that_one_instance_refuses_is_dropped_by_all_with_its_reason():
    async def main() -> None:
        told = Told()
        task = await begun(told)
        told.say("staged", 0)
        told.say("failed", 1, "a disk is gone")
        await asyncio.sleep(0.01)
        assert told.ends == [False, False]
        told.say("failed", 0)
        with pytest.raises(RequestRefused, match="decode-0 rank 0: a disk is gone"):
            await task

    asyncio.run(main())


def test_a_reload_that_nobody_waits_for_is_dropped():
    async def main() -> None:
        told = Told()
        task = await begun(told)
        told.say("staged", 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert told.ends == [False, False]

    asyncio.run(main())


def test_nothing_is_reloaded_before_the_ranks_are_ready():
    told = Told()
    told.missing = ["decode-0 rank 0"]
    with pytest.raises(RequestRefused, match="not ready: decode-0 rank 0"):
        asyncio.run(Experts(told).reload(Path("/new")))  # type: ignore[arg-type]
    assert told.told == []


def test_metrics_are_few_per_rank():
    """At most 20 series for a rank of an instance that balances; none where experts stay."""
    board = Board()
    mine = BalancingStatus(epoch=3, moves=4, moved_bytes=400, stall_seconds=0.5, aborted=1, stalled=True)
    for rank in range(2):
        board.observe(status(rank, balancing=mine), 0.0)
    samples = [s for family in balancing_metrics(board.ranks(), "x") for s in family.samples]
    values = {(s.name, s.labels.get("rank")): s.value for s in samples}
    assert values["x_placement_epoch", "1"] == 3
    assert values["x_expert_moves_total", "0"] == 4
    assert values["x_rebalances_aborted_total", "1"] == 1
    assert values["x_rebalance_stalled", None] == 1
    assert len([s for s in samples if s.labels.get("rank", "0") == "0"]) <= 20
    still = Board()
    still.observe(status(0), 0.0)
    assert not [s for family in balancing_metrics(still.ranks(), "x") for s in family.samples]
