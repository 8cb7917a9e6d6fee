"""Nothing is lost, nothing waits a negative time, nothing happens before its cause; leaps change nothing."""

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.virtual.cluster.clock import Clock
from moe_runtime.virtual.cluster.events import Failure, Rebalance, ScriptedEvent, Slowdown
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.moving import MoveUnit
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cluster.simulate import Cluster, MakeBalancer
from tests.virtual.cluster.small import (
    TICK,
    Kept,
    Restless,
    as_numbers,
    merged,
    plan,
    small_cluster,
)


@st.composite
def plans(draw: st.DrawFn) -> EffectivePlan:
    depth = draw(st.integers(0, 1))
    scheduler = {
        "pipeline_depth": depth,
        "max_sequences": draw(st.sampled_from([1, 3, 6])),
        "chunk_tokens": draw(st.sampled_from([5, 24])),
        "prefill_delay_steps": draw(st.sampled_from([0, 2])),
        "chunk_budget": draw(st.sampled_from(["fixed", "fixed", "tpot"])),
    }
    overlap = {"micro_batches": draw(st.sampled_from([1, "per_step"]))}
    kv = {"blocks": draw(st.sampled_from([14, 40])), "prefix_cache": draw(st.booleans())}
    ranks = draw(st.sampled_from([1, 2, 3]))
    if draw(st.booleans()):
        unified = {"expert_parallel": ranks, "instances": draw(st.integers(1, 2)), "overlap": overlap}
        return plan({"unified": unified}, scheduler=scheduler, kv=kv)
    prefill = {"expert_parallel": draw(st.sampled_from([1, 2])), "instances": draw(st.integers(1, 2))}
    decode = {"expert_parallel": ranks, "instances": draw(st.integers(1, 2)), "overlap": overlap}
    return plan({"prefill": prefill, "decode": decode}, scheduler=scheduler, kv=kv)


def arrivals(seed: int, count: int) -> list[VirtualRequest]:
    """Bursts of requests whose prompts share beginnings; a few are longer than any rank could serve."""
    rng = np.random.default_rng(seed)
    at, out = 0.0, []
    for index in range(count):
        at += float(rng.choice([0, 0, 1, 3_000, 20_000])) * TICK
        length = int(rng.integers(1, 41)) if rng.random() < 0.97 else 400
        blocks = -(-length // 8)
        shared = int(rng.integers(0, blocks + 1))
        ids = tuple(range(shared)) + tuple(1000 * (index + 1) + i for i in range(blocks - shared))
        out.append(
            VirtualRequest(
                index=index,
                at=at,
                input_length=length,
                output_length=int(rng.integers(1, 16 if rng.random() < 0.7 else 200)),
                hash_ids=ids if rng.random() < 0.8 else (),
                block_tokens=8.0,
            )
        )
    return out


def scripts(seed: int, where: EffectivePlan) -> list[ScriptedEvent]:
    rng = np.random.default_rng(seed)
    out: list[ScriptedEvent] = []
    for _ in range(rng.integers(0, 5)):
        one = where.instances[int(rng.integers(0, len(where.instances)))]
        at = float(rng.integers(0, 100_000)) * TICK
        kind = rng.integers(0, 4)
        if kind == 0:
            end = at + float(rng.integers(0, 50_000)) * TICK
            out.append(Slowdown(instance=one.name, rank=0, start=at, end=end, factor=2.0))
        elif kind == 1:
            out.append(Rebalance(instance=one.name, at=at))
        else:
            down = None if kind == 2 else float(rng.integers(0, 60_000)) * TICK
            out.append(Failure(instance=one.name, at=at, down=down))
    return out


def restless(seed: int, where: EffectivePlan) -> dict[str, MakeBalancer]:
    """Balancers of most instances: units that take longer or shorter than they may, in all mixtures."""

    def make(number: int, instance: Instance, clock: Clock) -> Restless:
        rng = np.random.default_rng([seed, number, instance.life])

        def draw() -> tuple[tuple[MoveUnit, ...], float]:
            units = tuple(
                MoveUnit(
                    seconds=float(rng.integers(0, 5_000)) * TICK,
                    turns=int(rng.choice([0, 1, 3, 40])),
                    commit_seconds=float(rng.integers(0, 64)) * TICK,
                )
                for _ in range(rng.integers(1, 4))
            )
            return units, float(rng.choice([2_000, 50_000, 2_000_000])) * TICK

        return Restless(instance, clock, int(rng.integers(1, 200)), draw)

    rng = np.random.default_rng(seed)
    asked = {e.instance for e in scripts(seed, where) if isinstance(e, Rebalance)}
    return {
        one.name: partial(make, number)
        for number, one in enumerate(where.instances)
        if rng.random() < 0.7 or one.name in asked
    }


def run(
    where: EffectivePlan,
    requests: list[VirtualRequest],
    events: list[ScriptedEvent],
    balancers: dict[str, MakeBalancer],
    *,
    fast_forward: bool = True,
) -> tuple[Cluster, Kept]:
    kept = Kept()
    cluster = small_cluster(
        where,
        kept,
        events=events,
        balancers=balancers,
        fast_forward=fast_forward,
    )
    cluster.run(requests)
    return cluster, kept


@settings(max_examples=40, deadline=None)
@given(where=plans(), seed=st.integers(0, 2**20), count=st.integers(1, 25), scripted=st.booleans())
def test_everything_is_accounted_for(where, seed, count, scripted):
    requests = arrivals(seed, count)
    events = scripts(seed, where) if scripted else []
    cluster, kept = run(where, requests, events, restless(seed, where) if scripted else {})
    failed = {e.instance for e in events if isinstance(e, Failure)}
    down = {name for name, instance in cluster.instances.items() if instance.failed}
    assert down <= failed

    assert sorted(e.index for e in kept.ends) == list(range(count)), "every request ends once"
    for end in kept.ends:
        request = requests[end.index]
        assert end.prompt_tokens == request.input_length
        assert (end.finish_reason == "length") == (end.output_tokens == request.output_length)
        assert (end.error is None) == (end.finish_reason == "length")
        assert 0 <= end.output_tokens <= request.output_length, "tokens in = tokens out + shed"
        assert 0 <= end.cached_tokens < max(1, request.input_length)
        times = (end.first_token, end.second_token, end.last_token)
        assert [t is not None for t in times] == [end.output_tokens > n for n in (0, 1, 0)]
        known = [end.arrival, *(t for t in times if t is not None)]
        assert known == sorted(known), "no event before its cause"
        assert end.arrival == request.at
        if end.first_token is not None:
            assert end.first_token >= end.arrival + 512 * TICK, "a token takes a step"

    for name, instance in cluster.instances.items():
        runs = kept.of(name)
        blocks = where.deployment(name.rpartition("-")[0]).kv_cache.blocks
        step, free = 0, 0.0
        for r in runs:
            assert r.first_step == step
            assert r.start >= free, "steps follow each other"
            assert r.seconds == r.cost.seconds > 0
            assert r.kv_used_R.max() <= blocks
            assert r.steps == 1 or not r.prefill_R.any()
            step, free = r.first_step + r.steps, r.start + r.seconds
        if name in down:
            continue
        for rank in range(len(instance.ranks)):
            scheduler = instance.ranks.scheduler(rank)
            scheduler.check_invariants()
            assert scheduler.pool.num_free == blocks, "pools are back at the baseline"
            assert not scheduler.by_request
    assert cluster.network.next_end() is None
    assert all(router.outstanding == [0] * len(router.targets) for router in cluster.desk.routers.values())
    if not failed:
        served = [e for e in kept.ends if e.output_tokens]
        computed = sum(int(r.prefill_R.sum() + r.cached_R.sum()) for r in kept.runs)
        assert computed == sum(e.prompt_tokens for e in served)
        assert sum(e.cached_tokens for e in served) == sum(int(r.cached_R.sum()) for r in kept.runs)
        decoded = sum(int(r.decode_R.sum()) * r.steps for r in kept.runs)
        preempted = sum(int(r.preemptions_R.sum()) for r in kept.runs)
        assert 0 <= sum(e.output_tokens - 1 for e in served) - decoded <= preempted


@settings(max_examples=40, deadline=None)
@given(where=plans(), seed=st.integers(0, 2**20), count=st.integers(1, 20), scripted=st.booleans())
def test_leaps_change_nothing(where, seed, count, scripted):
    requests = arrivals(seed, count)
    events = scripts(seed, where) if scripted else []
    balancers = restless(seed, where) if scripted else {}
    fast, leaping = run(where, requests, events, balancers)
    slow, walking = run(where, requests, events, balancers, fast_forward=False)
    assert leaping.ends == walking.ends
    for one in where.instances:
        quick, plain = merged(leaping.of(one.name)), merged(walking.of(one.name))
        assert [as_numbers(r) for r in quick] == [as_numbers(r) for r in plain]
        ours, theirs = (cluster.instances[one.name].balancer for cluster in (fast, slow))
        if isinstance(ours, Restless) and isinstance(theirs, Restless):
            assert (ours.windows, ours.ended, ours.commits) == (theirs.windows, theirs.ended, theirs.commits)
