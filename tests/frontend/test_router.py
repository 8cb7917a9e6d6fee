"""Routing by outstanding tokens."""

import numpy as np

from moe_runtime.frontend.router import Router, Target


def targets(n: int) -> list[Target]:
    return [Target(f"prefill/{i // 2}", i % 2) for i in range(n)]


def test_a_burst_spreads_evenly_though_nobody_answered():
    router = Router(targets(4))
    chosen = [router.assign(10) for _ in range(64)]
    assert np.bincount(chosen).tolist() == [16, 16, 16, 16]


def test_unequal_lengths_balance_by_tokens():
    router = Router(targets(4))
    rng = np.random.default_rng(0)
    for _ in range(200):
        router.assign(int(rng.choice([10, 1000])))
    load = router.outstanding
    assert max(load) / (sum(load) / 4) <= 1.3


def test_finished_work_makes_room():
    router = Router(targets(2))
    assert router.assign(100) == 0
    assert router.assign(10) == 1
    router.finished(0, 100)
    assert router.assign(5) == 0
    assert router.outstanding == [5, 10]
