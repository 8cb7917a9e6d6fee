"""What admission is for, in virtual time: under four times the load as many requests meet their objectives.

Admission, router, schedulers and chunk budget are those of a server; only the steps take no time of a
machine. `benchmarks/serving_load.py` measures the same on real ranks.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from moe_runtime.frontend.admission import derive_limits
from moe_runtime.plan.resolve import resolve
from moe_runtime.plan.schema import Plan
from moe_runtime.virtual.cluster.records import RequestEnd
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cluster.simulate import Cluster
from moe_runtime.virtual.cluster.times import plain_cost
from moe_runtime.virtual.cost.shapes import StepCost, StepShape
from tests.spec.model_specs import SMALL_DEEPSEEK
from tests.virtual.cluster.small import Kept

RANKS, SEQUENCES, BLOCKS, BLOCK = 2, 8, 2048, 16
SECONDS = 40.0


class Linear:
    """Steps of base + decode x rows + prefill x rows seconds, those of the fullest rank."""

    def __init__(self, base: float, decode: float, prefill: float) -> None:
        self.base, self.decode, self.prefill = base, decode, prefill

    def step(self, shape: StepShape) -> StepCost:
        rows = float(shape.decode_sequences_R.max()), float(shape.prefill_tokens_R.max())
        return plain_cost(self.base + self.decode * rows[0] + self.prefill * rows[1])

    def run(self, shape: StepShape, steps: int) -> tuple[StepCost, StepCost]:
        one = self.step(shape)
        return one.times(steps), one


def arrivals(rate: float, seed: int) -> list[VirtualRequest]:
    """Bursts, and lengths of which a few are many times the median, as in traces of conversations."""
    rng = np.random.default_rng(seed)
    count = round(rate * SECONDS)
    gaps = rng.gamma(0.4, 1.0, count)
    at = gaps.cumsum() * SECONDS / gaps.sum()
    prompts = np.clip(rng.lognormal(5.3, 1.0, count), 16, 3000).astype(int)
    outputs = np.clip(rng.lognormal(2.3, 0.7, count), 1, 80).astype(int)
    return [
        VirtualRequest(index=i, at=float(at[i]), input_length=int(prompts[i]), output_length=int(outputs[i]))
        for i in range(count)
    ]


def serve(times: Linear, requests: Sequence[VirtualRequest], ttft: float, tpot: float) -> list[RequestEnd]:
    tree: dict[str, Any] = {
        "model": {"path": "/nowhere", "dtype": "float32"},
        "cluster": {"nodes": 1, "ranks_per_node": RANKS, "device": "cpu", "hardware": "cpu-host"},
        "deployments": {
            "unified": {
                "expert_parallel": RANKS,
                "scheduler": {"max_sequences": SEQUENCES, "chunk_budget": "tpot"},
                "kv_cache": {"blocks": BLOCKS, "block_tokens": BLOCK},
            }
        },
        "slo": {"ttft_ms": 1e3 * ttft, "tpot_ms": 1e3 * tpot},
    }
    limits = derive_limits(
        decode_ranks=RANKS,
        prompt_ranks=RANKS,
        rank_kv_tokens=BLOCKS * BLOCK,
        rank_sequences=SEQUENCES,
        prefill_kv_tokens=BLOCKS * BLOCK,
        max_positions=SMALL_DEEPSEEK.max_positions,
        ttft_seconds=ttft,
    )
    kept = Kept()
    cluster = Cluster(
        resolve(Plan.model_validate(tree), SMALL_DEEPSEEK),
        SMALL_DEEPSEEK,
        times={"unified": times},
        kv_seconds=float,
        listener=kept,
        admission=limits,
    )
    cluster.run(requests)
    return kept.ends


def good(ends: Sequence[RequestEnd], ttft: float, tpot: float) -> int:
    """Requests that met both objectives."""
    count = 0
    for end in ends:
        if end.first_token is None or end.last_token is None or end.finish_reason != "length":
            continue
        per_token = (end.last_token - end.first_token) / max(1, end.output_tokens - 1)
        count += end.first_token - end.arrival <= ttft and per_token <= tpot
    return count


@pytest.mark.parametrize("times", [(0.03, 0.001, 0.0015), (0.1, 0.004, 0.004)], ids=["fast", "slow"])
def test_goodput_does_not_collapse_under_four_times_the_load(times):
    steps, ttft = Linear(*times), 4.0
    tpot = 2 * (steps.base + 4 * steps.decode)

    def finished(rate: float) -> int:
        ends = serve(steps, arrivals(rate, seed=9), ttft, tpot)
        return sum(e.finish_reason == "length" for e in ends)

    capacity = max(finished(rate) for rate in (1.0, 2.0, 4.0, 8.0)) / SECONDS
    met = [
        sum(good(serve(steps, arrivals(load * capacity, seed), ttft, tpot), ttft, tpot) for seed in range(2))
        for load in (0.5, 1.0, 2.0, 4.0)
    ]
    assert met[0] > 0.25 * 2 * capacity * SECONDS
    assert met[3] >= 0.9 * met[1], met
    assert all(more >= 0.9 * less for less, more in pairwise(met)), met
