"""Ranks that serve: cached prefixes change no token, and what is cancelled is gone within a second."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.promises import Promises
from moe_runtime.frontend.admission import Admission, derive_limits
from moe_runtime.frontend.bootstrap import Bootstrap
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.frontend.live import Live
from moe_runtime.spec.requests import FinishReason, SamplingParams
from moe_runtime.transfer.host import HostTransport
from tests.end_to_end.oracle import reference
from tests.engine.in_process import InProcess, ranks, running

MAX_TOKENS = 16
SECONDS = 1.0
TIGHT = {"kv_cache": {"blocks": 24, "block_tokens": 16}}
DEPLOYMENTS: dict[str, dict] = {
    "unified": {"unified": {}},
    "unified_depth_1": {"unified": {"scheduler": {"pipeline_depth": 1, "chunk_tokens": 20}}},
    "split": {"prefill": {}, "decode": {}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, family="deepseek_v3", size="tiny")
    return folder


def branching_prompts() -> list[list[int]]:
    """Prompts that begin alike: 100 tokens for most of them, 180 for some."""
    rng = np.random.default_rng(5)
    stem, branch = rng.integers(8, 512, 100).tolist(), rng.integers(8, 512, 80).tolist()
    ends = [rng.integers(8, 512, n).tolist() for n in (1, 9, 30, 12, 28, 3)]
    return [stem + ends[0], stem + ends[1], stem + branch + ends[2], stem + branch + ends[3], ends[4], stem]


@pytest.fixture(scope="module")
def references(checkpoint):
    return reference(checkpoint, branching_prompts(), MAX_TOKENS)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_cached_prefixes_change_no_token_and_are_counted_once(tmp_path, checkpoint, references, name):
    asked = branching_prompts()

    async def work(launch: InProcess) -> list[list[Live]]:
        rounds = []
        for _ in range(2):
            lives = [launch.submit(prompt, MAX_TOKENS) for prompt in asked]
            await asyncio.gather(*(live.done.wait() for live in lives))
            rounds.append(lives)
        await launch.until(launch.at_baseline, SECONDS, "everything back")
        return rounds

    with ranks(tmp_path, checkpoint, DEPLOYMENTS[name]) as (engines, bootstrap):
        rounds, statuses = asyncio.run(_with_statuses(engines, bootstrap, work))
    for lives in rounds:
        for live, one in zip(lives, references, strict=True):
            assert live.finish_reason == FinishReason.LENGTH
            assert live.token_ids[: one.safe] == one.tokens[: one.safe]
    assert sum(one.safe for one in references) > 0.9 * MAX_TOKENS * len(asked)
    # The second time everything is found but the block of the last prompt token.
    assert [live.cached_tokens for live in rounds[1]] == [(len(p) - 1) // 16 * 16 for p in asked]
    totals = [s.totals for s in statuses.values()]
    cached = sum(live.cached_tokens for lives in rounds for live in lives)
    assert sum(t.cached_prefill_tokens for t in totals) == cached
    assert sum(t.new_prefill_tokens for t in totals) + cached == 2 * sum(map(len, asked))
    assert sum(t.output_tokens for t in totals) == 2 * len(asked) * MAX_TOKENS
    if name == "split":
        # The second time a decode rank has all complete blocks of a prompt, and fetches the rest of it.
        decode = statuses["decode"].totals
        assert decode.pulled_tokens + decode.reused_tokens == 2 * sum(map(len, asked))
        assert decode.reused_tokens >= sum(len(p) // 16 * 16 for p in asked)


async def _with_statuses(engines, bootstrap, work):
    async with running(engines, bootstrap) as launch:
        result = await work(launch)
        return result, dict(launch.statuses)


# -- cancelling ---------------------------------------------------------------------------------

CAUSES = ("disconnect", "abort", "timeout")


async def cancel(launch: InProcess, live: Live, cause: str) -> None:
    """End a request as a frontend does: its connection went, it was told to, its deadline passed."""
    if cause == "disconnect":

        async def answer() -> None:
            try:
                await live.done.wait()
            finally:
                launch.fleet.abort(live)

        task = asyncio.create_task(answer())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif cause == "timeout":
        limits = derive_limits(
            decode_ranks=1,
            rank_kv_tokens=4096,
            rank_sequences=4,
            prefill_kv_tokens=4096,
            max_positions=4096,
            ttft_seconds=2.0,
        )
        admission = Admission(limits)
        admission.offer(live.request.id, prompt_tokens=1, max_tokens=1, now=0.0, timeout=5.0)
        for expired in admission.expired(now=5.0):
            assert expired == live.request.id
            launch.fleet.abort(live, FinishReason.ERROR, "the request took over 5 s")
    else:
        launch.fleet.abort(live)
    assert live.done.is_set()


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(8, 512, length).tolist()


async def waiting(launch: InProcess, seed: int) -> tuple[Live, list[Live]]:
    others = [launch.submit(prompt(8, seed + i), 300) for i in range(2)]
    live = launch.submit(prompt(8, seed + 9), 300)
    await launch.until(lambda: launch.statuses["unified"].waiting == 1, 3, "one waits")
    return live, others


async def half_prefilled(launch: InProcess, seed: int) -> tuple[Live, list[Live]]:
    before = launch.statuses["unified"].totals.new_prefill_tokens
    live = launch.submit(prompt(360, seed), 4)

    def begun() -> bool:
        return launch.statuses["unified"].totals.new_prefill_tokens > before

    await launch.until(begun, 3, "prefill begins")
    assert launch.statuses["unified"].totals.new_prefill_tokens < before + 360
    assert not live.token_ids
    return live, []


async def decoding(launch: InProcess, seed: int) -> tuple[Live, list[Live]]:
    live = launch.submit(prompt(8, seed), 300)
    await launch.until(lambda: len(live.token_ids) > 2, 3, "it decodes")
    return live, []


async def preempted(launch: InProcess, seed: int) -> tuple[Live, list[Live]]:
    before = launch.statuses["unified"].totals.preemptions
    lives = [launch.submit(prompt(170, seed + i), 200) for i in range(2)]

    def pushed_out() -> bool:
        status = launch.statuses["unified"]
        return status.totals.preemptions > before and status.waiting == 1

    await launch.until(pushed_out, 10, "one is preempted")
    return lives[1], lives[:1]


async def leased(launch: InProcess, seed: int) -> tuple[Live, list[Live]]:
    """The decode rank is full, so the prefilled KV stays on the prefill rank."""
    others = [launch.submit(prompt(8, seed + i), 400) for i in range(2)]
    await launch.until(lambda: all(len(o.token_ids) > 1 for o in others), 3, "the decode rank is full")
    live = launch.submit(prompt(40, seed + 9), 400)

    def handed_over() -> bool:
        return launch.statuses["decode"].waiting == 1 and launch.statuses["prefill"].kv_used > 0

    await launch.until(handed_over, 3, "handed over")
    return live, others


UNIFIED = {"unified": {"scheduler": {"max_sequences": 2, "chunk_tokens": 4}, **TIGHT}}
SPLIT = {"prefill": {}, "decode": {"scheduler": {"max_sequences": 2}, "kv_cache": {"blocks": 128}}}
State = Callable[[InProcess, int], Awaitable[tuple[Live, list[Live]]]]


async def cancel_in(launch: InProcess, state: State) -> None:
    """Every cause in one state: what it held is free within a second, though nothing new comes."""
    for i, cause in enumerate(CAUSES):
        live, others = await state(launch, 100 * i)
        await cancel(launch, live, cause)
        for other in others:
            launch.fleet.abort(other)

        def nothing_is_held() -> bool:  # a status may be older than what was cancelled
            ranks = launch.engines.values()
            held = [e.scheduler.pool.num_used + len(e.desk.handovers.leases) for e in ranks]
            return launch.at_baseline() and not any(held)

        took = await launch.until(nothing_is_held, SECONDS, f"baseline after {state.__name__}, {cause}")
        assert took < SECONDS


def test_cancelling_on_a_unified_rank(tmp_path, checkpoint):
    async def work(launch: InProcess) -> None:
        for state in (waiting, half_prefilled, decoding, preempted):
            await cancel_in(launch, state)

    with ranks(tmp_path, checkpoint, UNIFIED) as (engines, bootstrap):
        asyncio.run(_with_statuses(engines, bootstrap, work))


def test_cancelling_between_prefill_and_decode(tmp_path, checkpoint, monkeypatch):
    gate = threading.Event()
    gate.set()
    copy = HostTransport._copy
    monkeypatch.setattr(HostTransport, "_copy", lambda *args: (gate.wait(10), copy(*args))[1])

    async def pulling(launch: InProcess, seed: int) -> tuple[Live, list[Live]]:
        gate.clear()
        live = launch.submit(prompt(40, seed), 400)
        await launch.until(lambda: launch.statuses["decode"].pulling == 1, 3, "it is pulled")
        asyncio.get_running_loop().call_later(0.2, gate.set)  # a copy under way cannot be stopped
        return live, []

    async def work(launch: InProcess) -> None:
        await cancel_in(launch, leased)
        await cancel_in(launch, pulling)

    with ranks(tmp_path, checkpoint, SPLIT) as (engines, bootstrap):
        asyncio.run(_with_statuses(engines, bootstrap, work))


# -- several frontends ----------------------------------------------------------------------------


async def burst(bootstrap: Bootstrap, requests: int) -> list[list[Live]]:
    """The requests that two frontends send at once, all of them ended. Neither knows of the other's."""
    fleets = []
    for number in range(2):
        address = f"{bootstrap.address}.{number}"
        own = msgspec.structs.replace(bootstrap, frontend=number, frontends=2, address=address)
        fleets.append(Fleet(own, bounded=True))
    try:
        await asyncio.gather(*(fleet.start() for fleet in fleets))
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        lives = [[fleet.submit(prompt(20, i), params) for i in range(requests)] for fleet in fleets]
        await asyncio.wait_for(asyncio.gather(*(one.done.wait() for ours in lives for one in ours)), 30)
        return lives
    finally:
        for fleet in fleets:
            await fleet.shutdown()


@pytest.mark.parametrize("deployments", [UNIFIED, SPLIT], ids=["unified", "split"])
def test_a_burst_from_two_frontends_does_not_overcommit_a_rank(
    tmp_path, checkpoint, deployments, monkeypatch
):
    """Four requests have a place at a rank that runs two; who was promised one is served, nobody else is."""
    most: dict[int, tuple[int, int]] = {}
    add = Promises.add

    def watched(promises: Promises, request: int, tokens: int) -> None:
        add(promises, request, tokens)
        tokens, requests = most.get(id(promises), (0, 0))
        most[id(promises)] = max(tokens, promises.tokens), max(requests, promises.requests)

    monkeypatch.setattr(Promises, "add", watched)
    with ranks(tmp_path, checkpoint, deployments) as (engines, bootstrap):
        lives = asyncio.run(burst(bootstrap, 12))
    last = engines.get("unified") or engines["decode"]
    assert most[id(last.desk.promises)][1] <= 4
    for engine in engines.values():
        promises = engine.desk.promises
        assert most[id(promises)][0] <= promises.room.tokens
        assert (promises.tokens, promises.requests) == (0, 0)
        assert engine.scheduler.pool.num_used == 0
    served = [one for ours in lives for one in ours if one.finish_reason == FinishReason.LENGTH]
    assert all(len(one.token_ids) == 6 for one in served)
    turned_away = [one for ours in lives for one in ours if one.no_room]
    assert served
    assert turned_away
    assert len(served) + len(turned_away) == 24
