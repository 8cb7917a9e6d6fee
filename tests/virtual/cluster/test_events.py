"""What scripts do to a cluster, what admission sheds, and when two micro-batches are agreed."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from moe_runtime.engine.agree import OverlapReason
from moe_runtime.errors import InputError
from moe_runtime.frontend.admission import derive_limits
from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.virtual.cluster.clock import Clock
from moe_runtime.virtual.cluster.events import Failure, Rebalance, Slowdown
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.moving import MoveUnit
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cluster.simulate import simulate
from moe_runtime.virtual.cluster.times import StepTimes
from moe_runtime.virtual.cost.shapes import StepCost, StepShape
from tests.spec.model_specs import SMALL_DEEPSEEK
from tests.virtual.cluster.small import TICK, ExactTimes, Kept, Restless, kv_seconds, plan, small_cluster

SPLIT = {"prefill": {"expert_parallel": 1}, "decode": {"expert_parallel": 2}}


def requests(count: int, *, every: float = 0.0, prompt: int = 8, output: int = 30) -> list[VirtualRequest]:
    return [
        VirtualRequest(index=i, at=i * every, input_length=prompt, output_length=output) for i in range(count)
    ]


def known(time: float | None) -> float:
    assert time is not None
    return time


def run(
    where: EffectivePlan, arrivals: list[VirtualRequest], times: StepTimes | None = None, **more: Any
) -> Kept:
    kept = Kept()
    times = ExactTimes() if times is None else times
    simulate(
        where,
        SMALL_DEEPSEEK,
        arrivals,
        times={d.name: times for d in where.deployments},
        kv_seconds=kv_seconds,
        listener=kept,
        **more,
    )
    return kept


def test_a_slow_rank_slows_the_steps_that_begin_within_the_span():
    where = plan({"unified": {"expert_parallel": 2}})
    plain = run(where, requests(2))
    start, end = plain.runs[0].start + plain.runs[0].seconds, known(plain.ends[0].last_token)
    event = Slowdown(instance="unified-0", rank=1, start=start, end=(start + end) / 2, factor=3.0)
    slow = run(where, requests(2), events=[event])
    for r in slow.runs:
        within = event.start <= r.start < event.end
        assert (r.cost.parts["imbalance"] == pytest.approx(r.seconds * 2 / 3)) is within
    assert any(event.start <= r.start < event.end for r in slow.runs)
    assert known(slow.ends[0].last_token) > end
    assert [e.output_tokens for e in slow.ends] == [30, 30]


def test_when_prefill_dies_what_is_prefilled_goes_on_and_the_rest_ends():
    """KV that is on its way is computed again where the request is decoded."""
    where = plan(SPLIT, kv={"blocks": 200})
    first = known(run(where, requests(6, every=0.004)).ends[0].first_token)
    failure = Failure(instance="prefill-0", at=first + kv_seconds(8) / 2)
    kept = run(where, requests(6, every=0.004), events=[failure])
    by_index = {e.index: e for e in kept.ends}
    assert by_index[0].finish_reason == "length"
    assert sum(int(r.recomputed_R.sum()) for r in kept.of("decode-0")) >= 8
    assert [by_index[i].finish_reason for i in range(2, 6)] == ["error"] * 4
    assert {by_index[i].error for i in range(1, 6)} <= {None, "prefill-0 failed", "no rank is up"}
    assert max(r.start for r in kept.of("prefill-0")) < failure.at


def test_when_decode_dies_its_requests_end_with_what_they_have_and_its_leases_expire():
    where = plan(SPLIT)
    kept = Kept()
    middle = known(run(where, requests(3)).ends[0].last_token) / 2
    cluster = small_cluster(
        where,
        kept,
        events=[Failure(instance="decode-0", at=middle)],
    )
    cluster.run([*requests(3), VirtualRequest(index=9, at=1.0, input_length=4, output_length=4)])
    for end in kept.ends[:3]:
        assert end.error == "decode-0 failed"
        assert 0 < end.output_tokens < 30
        assert known(end.last_token) <= middle
    assert kept.ends[3].error == "no rank is up"
    prefill = cluster.instances["prefill-0"].ranks.scheduler(0)
    assert prefill.pool.num_free == prefill.pool.total


def test_kv_that_a_decode_rank_has_is_not_fetched_again():
    """As in the engine: who has seen a prefix is preferred, and only the rest of the KV is copied."""
    where = plan(SPLIT, scheduler={"max_batch_tokens": 512, "chunk_tokens": 512}, kv={"blocks": 400})
    asked: list[int] = []
    same = [
        VirtualRequest(
            index=i, at=0.5 * i, input_length=300, output_length=9, hash_ids=(7,), block_tokens=300.0
        )
        for i in range(2)
    ]

    def seconds(tokens: int) -> float:
        asked.append(tokens)
        return 0.125

    kept = Kept()
    times: dict[str, StepTimes] = {d.name: ExactTimes() for d in where.deployments}
    simulate(where, SMALL_DEEPSEEK, same, times=times, kv_seconds=seconds, listener=kept)
    assert asked == [300], "300 tokens are whole blocks: nothing is left to fetch"
    waits = [known(e.second_token) - known(e.first_token) for e in kept.ends]
    assert waits[0] > 0.125 > waits[1]
    assert [e.output_tokens for e in kept.ends] == [9, 9]


def test_what_an_aborted_prefill_leaves_is_free_for_what_waits():
    """The first request is given up while its last step runs; the second needs its blocks."""
    where = plan({"prefill": {"expert_parallel": 1}, "decode": {"expert_parallel": 1}}, kv={"blocks": 12})
    first = run(where, requests(1, prompt=40, output=2)).ends[0]
    limits = derive_limits(
        decode_ranks=1,
        rank_kv_tokens=48,
        rank_sequences=6,
        prefill_kv_tokens=48,
        max_positions=512,
        ttft_seconds=10.0,
        timeout=known(first.first_token) - TICK,
    )
    second = VirtualRequest(index=1, at=2_500 * TICK, input_length=8, output_length=1)
    kept = run(where, [*requests(1, prompt=40, output=2), second], admission=limits)
    assert [(e.index, e.output_tokens) for e in kept.ends] == [(0, 0), (1, 1)]
    assert "timeout" in (kept.ends[0].error or "")
    last = kept.of("prefill-0")[-1]
    assert last.start == known(first.first_token), "there are no blocks for it before"


def test_a_rebalance_is_agreed_unit_by_unit_and_changes_the_step_times():
    where = plan({"unified": {"expert_parallel": 2}})
    units = (
        MoveUnit(seconds=0.002, commit_seconds=0.125),
        MoveUnit(seconds=0.0, turns=5, commit_seconds=0.25),
        MoveUnit(seconds=0.004, commit_seconds=0.125),
    )
    made: list[Restless] = []

    def make(instance: Instance, clock: Clock) -> Restless:
        made.append(Restless(instance, clock, 60, lambda: (units, 10.0)))
        return made[-1]

    kept = run(where, requests(2, output=40), balancers={"unified-0": make})
    orders = [(r.decision.move.begin, r.decision.move.commit, r.decision.placement_epoch) for r in kept.runs]
    assert [o[0] for o in orders if o[0]] == [o[1] for o in orders if o[1]] == [1, 2, 3]
    assert [o[2] for o in orders] == sorted(o[2] for o in orders)
    assert orders[-1][2] == 3
    commits = [r for r in kept.runs if r.decision.move.commit]
    begins = [r for r in kept.runs if r.decision.move.begin]
    for begin, commit, unit in zip(begins, commits, units, strict=True):
        assert commit.seconds > unit.commit_seconds
        assert commit.start >= begin.start + unit.seconds
        assert commit.first_step >= begin.first_step + unit.turns
    assert commits[1].first_step == begins[1].first_step + 5, "in each step only so much may leave a rank"
    assert (made[0].ended, made[0].commits) == ([""], 3)
    plain = run(where, requests(2, output=40))
    last = [k.runs[-1].seconds / k.runs[-1].steps for k in (kept, plain)]
    assert last[0] == pytest.approx(last[1] / 2, rel=0.1), "after an odd number of commits"


def test_experts_that_take_too_long_are_dropped_and_an_idle_instance_only_waits():
    """A byte a step: half a million turns of a millisecond, of which none is held one by one."""
    where = plan({"unified": {"expert_parallel": 2}})
    made: list[Restless] = []

    def make(timeout: float, instance: Instance, clock: Clock) -> Restless:
        unit = MoveUnit(seconds=0.5, turns=500_000)
        made.append(Restless(instance, clock, 20, lambda: ((unit, unit), timeout)))
        return made[-1]

    late = VirtualRequest(index=9, at=100.0, input_length=4, output_length=1)
    for timeout in (10.0, 3_600.0):
        kept = Kept()
        cluster = small_cluster(
            where,
            kept,
            balancers={"unified-0": partial(make, timeout)},
        )
        cluster.run([*requests(2, output=10), late])
        assert cluster.instances["unified-0"].turns < 60
        assert known(kept.ends[-1].first_token) < 100.01, "it is served at once"
    assert made[0].ended == ["not every rank was staged within 10 s"]
    assert (made[1].ended, made[1].commits) == ([""], 2)
    assert made[1].clock.now == pytest.approx(1_000.0, rel=1e-3)


def test_an_instance_that_is_started_anew_serves_again_and_has_forgotten():
    where = plan(SPLIT, kv={"blocks": 200})
    fail = Failure(instance="decode-0", at=0.02, down=0.5)
    same = [
        VirtualRequest(index=i, at=t, input_length=8, output_length=9) for i, t in enumerate((0.0, 0.1, 1.0))
    ]
    kept = Kept()
    cluster = small_cluster(
        where,
        kept,
        events=[Failure(instance="decode-0", at=0.005, down=9.0), fail],
    )
    cluster.run(same)
    assert [e.error for e in kept.ends] == ["decode-0 failed", "no rank is up", None]
    assert cluster.instances["decode-0"].life == 2, "who fails while it starts begins anew"
    runs = kept.of("decode-0")
    assert [r.first_step for r in runs] == list(np.cumsum([0, *(r.steps for r in runs)])[:-1])
    prefill = run(where, same, events=[Failure(instance="prefill-0", at=0.05, down=0.5)])
    assert [e.error for e in prefill.ends] == [None, "no rank is up", None]


def test_admission_sheds_what_would_wait_too_long():
    where = plan({"unified": {"expert_parallel": 2}})
    limits = derive_limits(
        decode_ranks=2,
        rank_kv_tokens=160,
        rank_sequences=6,
        prefill_kv_tokens=160,
        max_positions=512,
        ttft_seconds=0.05,
        prompt_ranks=2,
    )
    everything = run(where, requests(200, every=1e-4))
    some = run(where, requests(200, every=1e-4), admission=limits)
    assert not [e for e in everything.ends if e.error]
    shed = [e for e in some.ends if e.error]
    assert 20 < len(shed) < 200
    assert all(e.output_tokens == 0 for e in shed)
    assert len(some.ends) == 200
    worst = [max(e.first_token - e.arrival for e in k.ends if e.first_token) for k in (some, everything)]
    assert worst[0] < worst[1] / 2
    timed = run(where, requests(200, every=1e-4), admission=replace(limits, timeout=0.03))
    late = [e for e in timed.ends if e.error and "timeout" in e.error]
    assert late
    assert all(e.last_token is None or e.last_token <= e.arrival + 0.03 for e in late)


def test_two_micro_batches_are_agreed_where_the_step_times_say_so():
    where = plan({"unified": {"expert_parallel": 2, "overlap": {"micro_batches": "per_step"}}})

    class Halves(ExactTimes):
        """Half as long with two micro-batches from four rows a rank on, twice as long below."""

        def step(self, shape: StepShape) -> StepCost:
            factor = 1.0 if shape.micro_batches == 1 else 0.5 if shape.tokens_R.max() >= 4 else 2.0
            return super().step(shape).times(factor)

    kept = run(where, requests(8, output=20) + requests(0), Halves())
    few = run(where, requests(2, output=20), Halves())
    reasons = {(int(r.decode_R.max() + r.prefill_R.max()) >= 4, r.decision.overlap_reason) for r in kept.runs}
    assert (True, OverlapReason.GAIN) in reasons
    assert (False, OverlapReason.GAIN) not in reasons
    assert {r.decision.overlap_reason for r in few.runs if not r.prefill_R.any()} <= {
        OverlapReason.NO_GAIN,
        OverlapReason.TOO_SMALL,
    }


def test_steps_are_costed_in_the_rounds_that_were_agreed():
    where = plan({"unified": {"expert_parallel": 2, "dispatch": {"max_tokens": 8}}})
    seen: list[tuple[int, int]] = []

    class Watched(ExactTimes):
        def step(self, shape: StepShape) -> StepCost:
            seen.append((shape.rounds, int(shape.tokens_R.max())))
            return super().step(shape)

    run(where, requests(4, prompt=20, output=3), Watched())
    assert max(seen)[0] > 1
    assert all(rounds == max(1, -(-tokens // 8)) for rounds, tokens in seen)


def test_scripts_and_arrivals_that_cannot_be_are_refused():
    where = plan(SPLIT)
    with pytest.raises(InputError, match="instance 'decode-1': the plan has prefill-0, decode-0"):
        run(where, [], events=[Failure(instance="decode-1", at=0.0)])
    with pytest.raises(InputError, match="rank 2: decode-0 has 2"):
        run(where, [], events=[Slowdown(instance="decode-0", rank=2, start=0, end=1, factor=2)])
    with pytest.raises(InputError, match="factor must be at least 1"):
        run(where, [], events=[Slowdown(instance="decode-0", rank=1, start=0, end=1, factor=0.5)])
    with pytest.raises(InputError, match="decode-0 has no balancer"):
        run(where, [], events=[Rebalance(instance="decode-0", at=0.0)])
    with pytest.raises(InputError, match="request 0 arrives at 0.0 s, before"):
        run(where, list(reversed(requests(2, every=1.0))))
