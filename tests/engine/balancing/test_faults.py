"""Faults while two real ranks serve: a copy that dies, one that hangs, a solver that stops, a window of NaN.

Every time serving goes on with the old placement, tokens stay, somebody says so, and the next attempt works.
At the end, with experts wherever all that has left them, the weights of another checkpoint take their place.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.balancing.wire import BalancingStatus, FinishReload, Reload
from moe_runtime.engine.collectives import Collective
from tests.engine.balancing.live import Forced, balancing_of, checksums, moves, prompts, rearranged
from tests.engine.balancing.test_live import make_plan
from tests.engine.instance import Driven, Files, never_park, run_requests, start
from tests.expert_parallel.world import Rank, run_world

pytestmark = pytest.mark.multiproc
TIMEOUT, TOKENS, INTERVAL, NEVER = 1.5, 24, 64, 1 << 40


class Found(NamedTuple):
    tokens: list[dict[int, list]]
    wrong: list[str]
    statuses: list[BalancingStatus]
    addresses: list[list[int]]
    warnings: list[str]
    reloads: list[str]
    reloaded: dict[int, list]
    fresh: dict[int, list]
    collectives: list[Collective]


def status(driven: Driven) -> BalancingStatus:
    return balancing_of(driven).status(time.monotonic())


@torch.inference_mode()
def settle(driven: Driven, name: str, over: Callable[[], bool] | None = None, seconds: float = 20.0) -> None:
    """COLLECTIVE: step until it is over on all ranks, equally often; by default, until nothing is to move."""
    files, deadline = Files(driven.rank, name), time.monotonic() + seconds

    def at_rest() -> bool:
        return not balancing_of(driven).busy and balancing_of(driven).mover.courier.idle

    for turn in range(10_000):
        for _ in range(20):
            driven.engine.desk.receive()
            driven.engine.step()
            driven.collect()
        if set(files.gather(f"rest{turn}", str((over or at_rest)()))) == {"True"}:
            return
        assert time.monotonic() < deadline, f"{name}: not over"


def until(driven: Driven, condition: Callable[[], bool]) -> None:
    """LOCAL: wait for the solver."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, status(driven)
        driven.engine.desk.receive()
        time.sleep(0.01)


def rebalance(driven: Driven, seed: int) -> None:
    """Rank 0 sends all to a random placement; the others hear of it."""
    controller = balancing_of(driven).controller
    if controller is not None:
        current = balancing_of(driven).mover.placement
        target = rearranged(current, "permute", np.random.default_rng(seed))
        controller.move_to(target, moves(current, target), time.monotonic())


def addresses(driven: Driven) -> list[int]:
    """Of all that a rebalance writes to."""
    mover = balancing_of(driven).mover
    tables = (mover.table.replica_start, mover.table.replica_slots, mover.table.cumulative)
    tensors = [view.ctypes.data for layer in mover.registry.tensors for _, view in layer]
    return [*tensors, *(t.data_ptr() for t in tables), *(s.marks.ctypes.data for s in mover.staging)]


def keep_warnings() -> list[str]:
    """LOCAL: what is said about balancing from now on."""
    said: list[str] = []
    handler = logging.Handler()
    setattr(handler, "emit", lambda record: said.append(record.getMessage()))  # noqa: B010
    logging.getLogger("moe_runtime.balancing").addHandler(handler)
    return said


@torch.inference_mode()
def reload(driven: Driven, path: Path) -> None:
    """COLLECTIVE: go over to other weights, asked while experts begin to move."""
    rebalance(driven, 9)
    driven.tell(Reload(frontend=0, version=1 << 60, path=str(path)))
    settle(driven, "staged", lambda: driven.reloads == ["staged"])
    driven.tell(FinishReload(version=1 << 60, commit=True))
    settle(driven, "reloaded", lambda: driven.reloads[1:] == ["in use"])


@torch.inference_mode()
def serve_with_faults(rank: Rank, plan: Path, other: Path) -> Found:
    driven, warnings = start(rank, plan), keep_warnings()
    never_park(driven)
    driven.engine.warm_up()
    forced = Forced(driven, checksums(driven))
    forced.install()
    requests = [(p, TOKENS) for p in prompts(rank.rank, 3, range(8, 500))]
    balancing, faulty = balancing_of(driven), rank.rank == 1
    courier, begin = balancing.mover.courier, addresses(driven)
    tokens, statuses = [run_requests(driven, requests).tokens], []

    def serve(name: str, seed: int) -> None:
        rebalance(driven, seed)
        tokens.append(run_requests(driven, requests).tokens)
        settle(driven, name)
        statuses.append(status(driven))

    copied: list[int] = []

    def dies(target: Any, source: Any) -> None:
        copied.append(len(source))
        if len(copied) == 3:  # in the middle of a layer
            raise ConnectionError("the link is gone")
        np.copyto(target, source)

    def hangs(target: Any, source: Any) -> None:
        time.sleep(1.5 * TIMEOUT)
        np.copyto(target, source)

    if faulty:
        courier.copy = dies
    serve("dies", 1)
    if faulty:
        courier.copy = hangs
    serve("hangs", 2)
    courier.copy = np.copyto
    serve("works", 3)
    if balancing.solver is not None:
        assert balancing.solver._process is not None
        os.kill(balancing.solver._process.pid, signal.SIGSTOP)
    balancing.meter.interval_tokens = INTERVAL
    tokens.append(run_requests(driven, requests).tokens)
    statuses.append(status(driven))
    if balancing.controller is not None:
        assert balancing.solver is not None
        assert balancing.solver._process is not None
        os.kill(balancing.solver._process.pid, signal.SIGCONT)
        until(driven, lambda: not status(driven).stalled)
        if not balancing.busy:
            balancing.controller.force()
            until(driven, lambda: balancing.busy)
    Files(rank, "continued").gather("all", "")
    settle(driven, "continued")
    tokens.append(run_requests(driven, requests).tokens)
    settle(driven, "end")
    statuses.append(status(driven))
    if faulty:
        balancing.meter._seconds = np.nan  # until this window ends
    tokens.append(run_requests(driven, requests).tokens)
    balancing.meter.interval_tokens = NEVER
    settle(driven, "nan")

    forced.truth, before = [], balancing.epoch
    reload(driven, other)
    assert balancing.epoch > before  # the rebalance came first
    fresh = start(rank, plan, [f"model.path={other}"], name="fresh")
    forced.truth = checksums(fresh, "fresh truth")
    reloaded, expected = (run_requests(d, requests).tokens for d in (driven, fresh))
    end = addresses(driven)
    fresh.close()
    driven.close()
    return Found(
        tokens,
        forced.wrong,
        statuses,
        [begin, end],
        warnings,
        driven.reloads,
        reloaded,
        expected,
        driven.collectives,
    )


def test_serving_goes_on_and_the_next_rebalance_works(tmp_path):
    balancing = {"enabled": True, "interval_tokens": NEVER, "timeout_s": TIMEOUT}
    plan, other = make_plan(tmp_path, "qwen3_moe", 2, balancing=balancing), tmp_path / "other"
    make_checkpoint(other, family="qwen3_moe", size="tiny", seed=1)
    results = run_world(tmp_path / "world", 2, serve_with_faults, plan, other)
    for found in results:
        assert found.wrong == []
        assert found.collectives == results[0].collectives  # whoever dawdled
        for tokens in found.tokens[1:]:
            assert tokens == found.tokens[0]
        dies, hangs, works, stopped, end = found.statuses
        assert (dies.epoch, dies.aborted) == (0, 1)
        assert (hangs.epoch, hangs.aborted) == (0, 2)
        assert (works.epoch, works.aborted) == (3, 2)  # all layers of the model
        assert stopped.epoch == works.epoch
        assert end.aborted == 2
        assert found.addresses[0] == found.addresses[1]  # nothing was allocated anew
        assert found.reloads == ["staged", "in use"]
        assert found.reloaded == found.fresh != found.tokens[0]
    assert any("nan" in said for said in results[0].warnings), results[0].warnings
    assert [found.statuses[3].stalled for found in results] == [True, False]
    assert not results[0].statuses[4].stalled
    assert results[0].statuses[4].epoch > results[0].statuses[3].epoch  # the solver's own target
