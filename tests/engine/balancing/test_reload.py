"""Reloads of weights while requests run: what comes after is what a fresh launch of the new weights says."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from safetensors.numpy import load_file, save_file

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.errors import CheckpointError, PlanError
from moe_runtime.frontend.experts import Experts
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.server.experts_admin import add_experts_admin
from moe_runtime.launch import reload
from moe_runtime.launch.preflight import preflight
from moe_runtime.launch.reload import require_replacement
from moe_runtime.launch.weights import WeightReader
from moe_runtime.models.families.registry import read_spec, tensor_targets
from moe_runtime.placement.placement import linear
from moe_runtime.scheduler.scheduler import Scheduler
from tests.end_to_end.commands import write_plan
from tests.engine.in_process import InProcess, ranks, running

TOKENS, ENDLESS = 8, 400
PROMPTS = [np.random.default_rng(seed).integers(8, 512, 20).tolist() for seed in range(3)]
# Bit for bit the same whatever else is in a batch, so that tokens can be compared.
SURE: dict[str, Any] = {"deterministic": True, "scheduler": {"pipeline_depth": 1}}
DEPLOYMENTS: dict[str, dict] = {"split": {"prefill": SURE, "decode": SURE}, "unified": {"unified": SURE}}


Work = Callable[[InProcess, httpx.AsyncClient], Awaitable[Any]]


def serve(folder: Path, checkpoint: Path, deployments: dict, work: Work) -> Any:
    """Run `work` against a launch of a checkpoint, with the admin endpoints before it."""

    async def main(engines: Any, bootstrap: Any) -> Any:
        flight = preflight(folder / "plan.yaml", (), check_tensors=False)
        async with running(engines, bootstrap) as launch, _client(launch, flight) as client:
            result = await work(launch, client)
            await launch.until(launch.at_baseline, 5, "everything back")
            return result

    folder.mkdir(exist_ok=True)
    with ranks(folder, checkpoint, deployments) as (engines, bootstrap):
        return asyncio.run(main(engines, bootstrap))


@asynccontextmanager
async def _client(launch: InProcess, flight: Any) -> Any:
    app = FastAPI()
    add_experts_admin(app, Experts(launch.fleet), partial(require_replacement, flight))

    @app.exception_handler(ApiError)
    async def refused(request: object, error: Any) -> Response:
        return Response(error.body, error.status)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def generate(launch: InProcess, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    lives = [launch.submit(prompt, count) for prompt, count in asked]
    await asyncio.gather(*(live.done.wait() for live in lives))
    return [live.token_ids for live in lives]


@pytest.mark.parametrize("name", ["split", pytest.param("unified", marks=pytest.mark.soak)])
def test_running_requests_go_on_with_the_new_weights(tmp_path, monkeypatch, name):
    """Also those that are queued or on their way between instances; no prefix of the old weights is found.

    What cannot be served is refused before that, and changes nothing.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    for seed, folder in enumerate((old, new)):
        make_checkpoint(folder, family="deepseek_v3", size="tiny", seed=seed)
    unfit = spoiled(tmp_path, new)
    swaps: list[dict[int, int]] = []
    forget = Scheduler.forget_kv

    def noted(scheduler: Scheduler) -> None:
        swaps.append({i: s.num_known - s.prompt_len for i, s in scheduler.by_request.items()})
        forget(scheduler)

    monkeypatch.setattr(Scheduler, "forget_kv", noted)

    async def work(launch: InProcess, client: httpx.AsyncClient) -> Found:
        still = await generate(launch, [(prompt, TOKENS) for prompt in PROMPTS])
        refused = []
        for folder in unfit:
            answer = await client.post("/admin/reload", json={"path": str(folder)})
            refused.append((answer.status_code, answer.json()["error"]["message"]))
        lives = [launch.submit(prompt, ENDLESS) for prompt in PROMPTS]
        await launch.until(lambda: all(len(live.token_ids) > 3 for live in lives), 20, "all decode")
        asked = asyncio.create_task(client.post("/admin/reload", json={"path": str(new)}))
        while not asked.done():
            await launch.submit(PROMPTS[0][:9], 3).done.wait()
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "reloaded"
        placement = (await client.get("/admin/placement")).json()
        assert {one["weights"] for one in placement["instances"].values()} == {str(new)}
        after = await generate(launch, [(prompt, TOKENS) for prompt in PROMPTS])
        at = [max(s[live.request.id] for s in swaps if live.request.id in s) for live in lives]
        both = list(zip(lives, at, strict=True))
        await launch.until(lambda: all(len(v.token_ids) >= k + TOKENS for v, k in both), 20, "new tokens")
        for live in lives:
            launch.fleet.abort(live)
        return Found(still, refused, [(v.token_ids[:k], v.token_ids[k:][:TOKENS]) for v, k in both], after)

    found: Found = serve(tmp_path / "reloaded", old, DEPLOYMENTS[name], work)
    assert [code for code, _ in found.refused] == [400, 400, 400, 409]
    for (_, message), what in zip(
        found.refused, ("config.json", "another model", "another tokenizer", "NaN"), strict=True
    ):
        assert what in message
    assert len(swaps) == len(DEPLOYMENTS[name])
    asked = [p + begun for p, (begun, _) in zip(PROMPTS, found.running, strict=True)]

    async def ask(launch: InProcess, _: object) -> list[list[int]]:
        return await generate(launch, [(prompt, TOKENS) for prompt in asked + PROMPTS])

    fresh = serve(tmp_path / "fresh", new, DEPLOYMENTS[name], ask)
    assert [rest for _, rest in found.running] + found.after == fresh
    for still, (begun, _), after in zip(found.still, found.running, found.after, strict=True):
        assert begun[: len(still)] == still[: len(begun)]
        assert after != still


class Found(NamedTuple):
    """`running`: tokens before and after the instance that decodes has changed its weights."""

    still: list[list[int]]
    refused: list[tuple[int, str]]
    running: list[tuple[list[int], list[int]]]
    after: list[list[int]]


def spoiled(folder: Path, model: Path) -> list[Path]:
    """Checkpoints that cannot take the model's place: none, of another model, of other words, with a NaN."""
    other, words, nan = folder / "other", folder / "words", folder / "nan"
    make_checkpoint(other, family="qwen3_moe", size="tiny")
    for copy in (words, nan):
        shutil.copytree(model, copy)
    (words / "tokenizer.json").write_text("{}")
    file = sorted(nan.glob("*.safetensors"))[-1]
    tensors = {name: values.copy() for name, values in load_file(file).items()}
    next(v for name, v in tensors.items() if "e_score_correction_bias" not in name).reshape(-1)[0] = np.nan
    save_file(tensors, file)
    return [folder / "missing", other, words, nan]


def test_a_second_set_of_weights_must_fit(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "model", family="qwen3_moe", size="tiny")
    plan = write_plan(tmp_path / "plan.yaml", tmp_path / "model", {"unified": {"expert_parallel": 2}})
    flight = preflight(plan, (), check_tensors=False)
    require_replacement(flight, tmp_path / "model")  # the same again may be asked for
    monkeypatch.setattr(reload, "available_memory_bytes", lambda: 1000)
    with pytest.raises(PlanError, match="0 MiB are free"):
        require_replacement(flight, tmp_path / "model")


def test_odd_folders_are_refused_and_another_dtype_is_not(tmp_path):
    make_checkpoint(tmp_path / "model", family="qwen3_moe", size="tiny")
    make_checkpoint(tmp_path / "bfloat16", family="qwen3_moe", size="tiny", dtype="bfloat16")
    odd = tmp_path / "odd"
    shutil.copytree(tmp_path / "model", odd)
    (odd / "tokenizer.json").unlink()
    (odd / "tokenizer.json").mkdir()
    plan = write_plan(tmp_path / "plan.yaml", tmp_path / "model", {"unified": {"expert_parallel": 2}})
    flight = preflight(plan, (), check_tensors=False)
    require_replacement(flight, tmp_path / "bfloat16")
    for path in (odd, Path("/" + "a" * 5000), Path("a\0b"), plan):
        with pytest.raises(CheckpointError):
            require_replacement(flight, path)


def test_ranks_check_what_they_read(tmp_path):
    """A checkpoint may have changed since a frontend looked at it."""

    make_checkpoint(tmp_path / "model", family="qwen3_moe", size="tiny")
    spec = read_spec(tmp_path / "model")
    file = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    tensors = load_file(file)
    name = next(name for name, values in tensors.items() if len(values) > 1)
    save_file({**tensors, name: tensors[name][:-1].copy()}, file)

    def build() -> Any:
        raise AssertionError("memory is taken for weights that cannot be used")

    reader = WeightReader(build=build, targets=tensor_targets(spec), skipped=lambda name: False, rank=0)
    placement = linear(num_layers=spec.num_moe_layers, num_experts=spec.moe.num_experts, num_ranks=1)
    with pytest.raises(CheckpointError, match=name):
        reader.reread(tmp_path / "model", placement, lambda: True)
