"""Routing by outstanding tokens, prefix affinity and room."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.errors import RequestRefused
from moe_runtime.frontend.router import Router, Target, role_router


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


def prompt(i: int, length: int = 300) -> list[int]:
    return [i] * length


def test_a_prefix_goes_where_it_has_been():
    router = Router(targets(4))
    for i in range(8):
        router.assign(100, prompt=prompt(i))
    homes = {i: router.assign(10, prompt=[*prompt(i)[:256], 7, 8]) for i in range(8)}
    assert homes == {i: i % 4 for i in range(8)}


def test_short_prompts_have_no_home():
    router = Router(targets(2))
    assert [router.assign(10, prompt=prompt(1, 255)) for _ in range(4)] == [0, 1, 0, 1]
    off = Router(targets(2), affinity_tokens=0)
    assert [off.assign(10, prompt=prompt(1)) for _ in range(4)] == [0, 1, 0, 1]


def test_a_home_over_twice_the_mean_sends_work_away_and_gets_it_back():
    router = Router(targets(4))
    assert router.assign(100, prompt=prompt(1)) == 0
    assert router.assign(100, prompt=prompt(1)) == 1, "100 is over twice the mean of 25"
    assert router.assign(100, prompt=prompt(1)) == 0, "100 is not over twice the mean of 50"
    router.finished(0, 200)
    assert router.assign(100, prompt=prompt(1)) == 0, "the first home comes first"


def decode_router(*, affinity: bool) -> Router:
    return role_router(
        "decode",
        targets(4),
        kv_tokens=10_000,
        max_sequences=100,
        bounded=False,
        decode_affinity=affinity,
    )


def test_a_home_among_decode_ranks_is_idle():
    router = decode_router(affinity=True)
    assert [router.assign(10), router.assign(10), router.assign(10, prompt=prompt(1))] == [0, 1, 2]
    for rank in range(3):
        router.finished(rank, 10)
    assert router.assign(10, prompt=prompt(1)) == 2, "idle like the others, and it has the prefix"
    assert router.assign(10, prompt=prompt(1)) == 0, "the home is busy"
    plain = decode_router(affinity=False)
    assert [plain.assign(10, prompt=prompt(1)) for _ in range(4)] == [0, 1, 2, 3]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), num=st.integers(1, 5))
def test_affinity_holds_exactly_while_the_load_allows_it(seed, num):
    rng = np.random.default_rng(seed)
    router = Router(targets(num))
    first: dict[int, int] = {}
    live: list[tuple[int, int]] = []
    for _ in range(200):
        key, tokens = int(rng.integers(6)), int(rng.integers(1, 500))
        load = np.array(router.outstanding)
        index = router.assign(tokens, prompt=prompt(key))
        live.append((index, tokens))
        home = first.setdefault(key, index)
        if load[home] <= 2 * load.mean():
            assert index == home
        elif index != home:
            assert load[index] <= 2 * load.mean()
        if rng.random() < 0.6:
            router.finished(*live.pop(int(rng.integers(len(live)))))
    while live:
        router.finished(*live.pop())
    assert router.outstanding == [0] * num


def test_room_in_the_cache_counts_before_affinity():
    router = Router(targets(3), kv_tokens=1000)
    assert router.assign(600, prompt=prompt(1)) == 0
    router.assign(600)
    router.assign(600)
    router.finished(0, 600)
    assert router.assign(900, prompt=prompt(2)) == 0
    assert router.assign(300, prompt=prompt(2)) == 1, "300 more do not fit at home"
    assert router.assign(5000) == 2, "fits nowhere: the least loaded refuses it"


def test_what_other_frontends_sent_counts():
    router = Router(targets(3))
    router.observe(0, others_tokens=500)
    router.observe(1, others_tokens=100)
    assert [router.assign(60) for _ in range(4)] == [2, 2, 1, 2]
    router.observe(0, others_tokens=0)
    assert router.assign(1) == 0


def test_a_rank_may_be_asked_for_by_name():
    router = Router(targets(3))
    assert [router.assign(10, prompt=prompt(1), rank=2) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(RequestRefused, match="rank 3 was asked for, ranks are 0 to 2"):
        router.assign(10, rank=3)
    router.set_down(1, down=True)
    with pytest.raises(RequestRefused, match="rank 1 was asked for, it is down"):
        router.assign(10, rank=1)
    assert [router.assign(10) for _ in range(2)] == [0, 0]
    for index in range(3):
        router.set_down(index, down=True)
    with pytest.raises(RequestRefused, match="no rank is up"):
        router.assign(10)


def test_stale_statuses_do_not_gather_a_burst():
    """64 arrivals between two statuses of 4 ranks, all of which look alike: 16 each."""
    router = Router(targets(4), kv_tokens=100_000)
    for index in range(4):
        router.observe(index, others_tokens=1000)
    chosen = [router.assign(300, prompt=prompt(i)) for i in range(64)]
    assert np.bincount(chosen).tolist() == [16, 16, 16, 16]
