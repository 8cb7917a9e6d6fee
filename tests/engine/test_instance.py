"""Instances of four ranks with uneven work: equal collectives, nobody held up, overlap changes no token."""

import itertools
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.agree import OverlapReason, StepKind
from moe_runtime.report.records import RankSteps
from moe_runtime.virtual.cluster.times import MeasuredTimes
from tests.end_to_end.commands import write_plan
from tests.engine.instance import Done, Driven, never_park, run_requests, run_steps, start
from tests.expert_parallel.cases import pairwise
from tests.expert_parallel.world import Failure, Rank, World, run_world
from tests.virtual.cluster.replayed import Replay, Sent, draw_trace, virtual_run

pytestmark = pytest.mark.multiproc
STEPS = 500
TRACE = draw_trace(4, 24, turns=14, seed=0)
TIMEOUT = 0.05


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("instance")
    make_checkpoint(folder / "tiny", family="deepseek_v3", size="tiny")
    scheduler = {"max_batch_tokens": 64, "chunk_tokens": 12, "max_sequences": 8}
    unified = {
        "expert_parallel": 4,
        "scheduler": scheduler,
        "kv_cache": {"blocks": 64},
        "dispatch": {"max_tokens": 16},
    }
    return write_plan(folder / "plan.yaml", folder / "tiny", {"unified": unified})


def skew_clock(seconds: float) -> None:
    """All of this process reads a clock that is so much ahead."""
    true = time.monotonic
    time.monotonic = lambda: true() + seconds


class Client(threading.Thread):
    """Sends a rank requests, with pauses in which it is idle, and drops those older than `TIMEOUT`."""

    def __init__(self, driven: Driven, seed: int) -> None:
        super().__init__(daemon=True)
        self.driven, self.random = driven, random.Random(seed)
        self.stop = threading.Event()
        self.sent = self.dropped = 0

    def run(self) -> None:
        pending: list[tuple[float, int]] = []
        while not self.stop.wait(self.random.random() * 0.04):
            now = time.monotonic()
            while pending and now - pending[0][0] > TIMEOUT:
                self.driven.abort(pending.pop(0)[1])
                self.dropped += 1
            if self.random.random() < 0.1:
                self.stop.wait(self.random.random() * 0.2)
            prompt = [self.random.randrange(8, 500) for _ in range(self.random.randrange(1, 24))]
            self.driven.submit(self.sent, prompt, self.random.randrange(1, 12))
            pending.append((now, self.sent))
            self.sent += 1


@torch.inference_mode()
def run_randomly(rank: Rank, plan: Path, overrides: tuple[str, ...]) -> tuple[list, int, int, int]:
    """What the rank did together with others, and how many requests it got, dropped and finished."""
    skew_clock((0.005, -0.005, 0.002, 0.0)[rank.rank])
    driven = start(rank, plan, overrides)
    client = Client(driven, rank.rank)
    driven.engine.warm_up()
    client.start()
    run_steps(driven, STEPS)
    client.stop.set()
    client.join()
    driven.close()
    return driven.collectives, client.sent, client.dropped, len(driven.finished)


def test_ranks_that_are_randomly_idle_do_the_same_collectives(tmp_path, plan):
    """500 steps; clocks differ by up to 10 ms; requests that take over 50 ms of a rank's clock are
    dropped; whether steps are split follows from times that every rank measures with its own clock."""
    overrides = ("deployments.unified.overlap.micro_batches=per_step",)
    results = run_world(tmp_path, 4, run_randomly, plan, overrides)
    first = results[0][0]
    assert [c for c in first if c.operation == "exchange"][-1].step == STEPS - 1
    assert {c.operation for c in first} == {"exchange", "dispatch", "combine"}
    assert max(c.sequence for c in first if c.operation == "dispatch") > STEPS
    for collectives, sent, dropped, _ in results:
        assert collectives == first
        assert sent > 20
        assert dropped > 0
    assert sum(finished for *_, finished in results) > 0


# -- operators' cases ------------------------------------------------------------------------------

COUNTS = (0, 1, 2, 3, 7)
SHAPES = [
    tuple(int(str(row[f"rank{r}"])) for r in range(4))
    for row in pairwise({f"rank{r}": COUNTS for r in range(4)})
]


def text(rank: int, number: int, length: int) -> list[int]:
    """A prompt that no other rank or request has."""
    return random.Random(1000 * rank + number).choices(range(8, 500), k=length)


def both_ways(driven: Driven, requests: Sequence[tuple[list[int], int]], split: bool) -> list[str]:
    """COLLECTIVE: run requests whole and in two micro-batches; a line for each thing that is wrong.

    `split`: whether some rank has rows enough for two.
    """
    whole, halves = (run_requests(driven, requests, micro_batches=n) for n in (1, 2))
    wrong = [] if whole.tokens == halves.tokens else [f"tokens {whole.tokens} and {halves.tokens}"]
    wanted = {i: n for i, (_, n) in enumerate(requests)}
    wrong += [] if {i: len(t) for i, t in whole.tokens.items()} == wanted else ["too few tokens"]
    wrong += [] if {d.micro_batches for d in whole.decisions} <= {1} else ["split without being asked"]
    found = [(d.micro_batches, d.overlap_reason) for d in halves.decisions[:1]]
    expected = (2, OverlapReason.ASKED) if split else (1, OverlapReason.TOO_SMALL)
    return wrong + ([] if found in ([], [expected]) else [f"{found}, not {expected}"])


def run_shapes(driven: Driven, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """COLLECTIVE: n sequences of one token on each rank, then a prompt of n tokens."""
    mine, wrong = driven.rank.rank, []
    for number, shape in enumerate(shapes):
        rows = [([8 + (7 * number + i) % 492], 2) for i in range(shape[mine])]
        prompt = [(text(mine, number, shape[mine]), 2)] if shape[mine] else []
        for requests in (rows, prompt):
            wrong += [f"{shape}, rank {mine}: {line}" for line in both_ways(driven, requests, max(shape) > 1)]
    return wrong


def one_request(driven: Driven) -> Done:
    """One on rank 0, prefill and decode; nothing on the others."""
    mine = driven.rank.rank
    return run_requests(driven, [(text(0, 0, 30), 20)] if mine == 0 else [])


def one_idle(driven: Driven) -> Done:
    """Rank 2 idle, the others with prompts."""
    mine = driven.rank.rank
    requests = [] if mine == 2 else [(text(mine, 0, 12), 2)]
    return run_requests(driven, requests, micro_batches=2)


def five_prompts(driven: Driven) -> list[str]:
    """Five prompts of four tokens on four ranks."""
    mine = driven.rank.rank
    return both_ways(driven, [(text(mine, i, 4), 20) for i in range(2 if mine == 0 else 1)], True)


def run_trace(driven: Driven, sent: Sequence[Sent], depth: int) -> RankSteps:
    """COLLECTIVE: every request at its turn; the steps that this rank took."""
    engine, mine = driven.engine, driven.rank.rank
    engine.pipeline_depth, driven.finished = depth, {}
    engine.desk.log.take()
    own = {number: one for number, one in enumerate(sent) if one.rank == mine}
    for turn in itertools.count():
        for number in (n for n, one in own.items() if one.turn == turn):
            prompt = text(9, depth, own[number].common) + text(
                mine, 100 * (1 + depth) + number, own[number].own
            )
            driven.submit(number, prompt, own[number].output)
            while number not in engine.scheduler.by_request:
                engine.desk.receive()
        if engine.step() is StepKind.PARK:
            break
    while len(driven.finished) < len(own):
        driven.collect()
    engine.pipeline_depth = 0
    return engine.desk.log.take()


def run_cases(rank: Rank, plan: Path, shapes: Sequence[tuple[int, ...]]) -> dict[str, object]:
    driven = start(rank, plan)
    never_park(driven)
    results = {
        "traced": [run_trace(driven, TRACE, depth) for depth in (0, 1)],
        "one_request": one_request(driven),
        "one_idle": one_idle(driven),
        "five_prompts": five_prompts(driven),
        "shapes": run_shapes(driven, shapes),
    }
    collectives = driven.collectives
    driven.close()
    return {**results, "collectives": collectives}


@pytest.fixture(scope="module")
def cases(tmp_path_factory, plan) -> list[dict]:
    """By rank, what came of all cases on one instance."""
    return run_world(tmp_path_factory.mktemp("cases"), 4, run_cases, plan, SHAPES)


def test_one_busy_rank_is_served_while_three_are_idle(cases):
    assert [len(t) for t in cases[0]["one_request"].tokens.values()] == [20]
    assert [c["one_request"].tokens for c in cases[1:]] == [{}] * 3
    assert all(c["one_request"].decisions == cases[0]["one_request"].decisions for c in cases)


def test_an_idle_rank_splits_with_the_others(cases):
    for rank, case in enumerate(cases):
        first = case["one_idle"].decisions[0]
        assert (first.micro_batches, first.overlap_reason) == (2, OverlapReason.ASKED)
        assert len(case["one_idle"].tokens) == (0 if rank == 2 else 1)


def test_five_prompts_on_four_ranks_give_the_same_tokens_with_overlap(cases):
    assert [c["five_prompts"] for c in cases] == [[]] * 4


def test_batch_shapes_give_the_same_tokens_with_overlap(cases):
    """Every pair of counts of two ranks occurs; the whole grid is a soak test."""
    assert len(SHAPES) >= 25
    assert [c["shapes"] for c in cases] == [[]] * 4


def test_all_of_it_was_the_same_collectives_everywhere(cases):
    assert all(c["collectives"] == cases[0]["collectives"] for c in cases)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_virtual_cluster_batches_as_these_ranks_do(cases, plan, depth):
    """Step by step and rank by rank: each step takes what the engine's took, so that arrivals fall alike."""
    steps = [case["traced"][depth] for case in cases]
    walls = np.max([s.wall for s in steps], axis=0).tolist()
    overrides = (f"deployments.unified.scheduler.pipeline_depth={depth}",)
    kept = virtual_run(plan, overrides, TRACE, walls, Replay(walls))
    runs = [run for run in kept.runs for _ in range(run.steps)]
    assert len(runs) == len(walls)
    for rank, real in enumerate(steps):
        assert [int(r.decode_R[rank]) for r in runs] == real.decode_tokens.tolist()
        assert [int(r.prefill_R[rank]) for r in runs] == real.prefill_tokens.tolist()
        assert [int(r.cached_R[rank]) for r in runs] == real.cached_tokens.tolist()
        assert [int(r.recomputed_R[rank]) for r in runs] == real.recomputed_tokens.tolist()
    assert sum(int(s.cached_tokens.sum()) for s in steps) > 0
    assert sum(e.output_tokens for e in kept.ends) == sum(one.output for one in TRACE)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_virtual_cluster_is_as_fast_as_these_ranks(cases, plan, depth):
    """Of measured times only their means by rows are known; when a request comes to which step may differ."""
    steps = [case["traced"][depth] for case in cases]
    walls = np.max([s.wall for s in steps], axis=0)
    decode, prefill = (
        np.max([getattr(s, n) for s in steps], axis=0) for n in ("decode_tokens", "prefill_tokens")
    )
    times = MeasuredTimes(zip(decode.tolist(), prefill.tolist(), walls.tolist(), strict=True))
    overrides = (f"deployments.unified.scheduler.pipeline_depth={depth}",)
    kept = virtual_run(plan, overrides, TRACE, walls.tolist(), times)
    seconds = max(r.start + r.seconds for r in kept.runs)
    assert seconds == pytest.approx(float(walls.sum()), rel=0.1)


def run_grid(rank: Rank, plan: Path) -> list[str]:
    driven = start(rank, plan)
    never_park(driven)
    wrong = run_shapes(driven, list(itertools.product(COUNTS, repeat=4)))
    driven.close()
    return wrong


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_batch_shape_gives_the_same_tokens_with_overlap(tmp_path, plan):
    assert run_world(tmp_path, 4, run_grid, plan, deadline=3500) == [[]] * 4


def run_short_of_blocks(rank: Rank, plan: Path) -> Done:
    """Rank 1 has four blocks of 16 tokens: one request never fits, two only one after the other."""
    blocks = 4 if rank.rank == 1 else 64
    driven = start(rank, plan, [f"deployments.unified.kv_cache.blocks={blocks}"])
    never_park(driven)
    lengths = (70, 35, 40) if rank.rank == 1 else (20, 20)
    done = run_requests(driven, [(text(rank.rank, i, n), 6) for i, n in enumerate(lengths)])
    driven.close()
    return done


def test_a_rank_without_blocks_holds_nobody_up(tmp_path, plan):
    results = run_world(tmp_path, 4, run_short_of_blocks, plan)
    short = results.pop(1)
    assert list(short.refused) == [0]
    assert "64 tokens" in short.refused[0] or "4 blocks" in short.refused[0], short.refused
    assert {n: len(t) for n, t in short.tokens.items()} == {1: 6, 2: 6}
    for done in results:
        assert {n: len(t) for n, t in done.tokens.items()} == {0: 6, 1: 6}
    # Somebody advances in every step: prompts in chunks of 12 and tokens, the two one after the other.
    assert len(short.decisions) <= 2 * (4 + 6)
    assert all(d.decode_rows + d.prefill_rows > 0 for d in short.decisions)


@torch.inference_mode()
def park_and_fall(rank: Rank, plan: Path) -> None:
    """There is no work: all ranks park in their first step, and rank 1 ends there."""
    driven = start(rank, plan)
    if rank.rank == 1:
        setattr(driven.engine.desk.inbox, "wait", lambda seconds: os._exit(1))  # noqa: B010
    driven.engine.step()


def test_parked_ranks_hear_of_one_that_ended(tmp_path, plan):
    with World(tmp_path, 4, park_and_fall, plan) as world:
        for failure in world.results([0, 2, 3]):
            assert isinstance(failure, Failure)
            assert failure.kind == "PeerLost", failure.trace
            assert "waiting for rank 1, agreement, step 0: no longer running" in failure.message
