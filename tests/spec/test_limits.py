"""Published backend limits as data: each bound refuses and allows what it should."""

from dataclasses import replace

import pytest

from moe_runtime.spec.limits import LIMITS, DispatchSizes, violations

GOOD = DispatchSizes(ranks=32, slots=288, hidden=7168, top_k=8, max_tokens=128, row_bytes=7168 * 2)


def broken(backend: str, kind: str = "hard", **changes: int) -> list[str]:
    return [v.message for v in violations(backend, replace(GOOD, **changes)) if v.limit.kind == kind]


@pytest.mark.parametrize("backend", [b for b in LIMITS if b.startswith("deepep")])
def test_a_published_deployment_passes(backend):
    assert violations(backend, GOOD) == ()


@pytest.mark.parametrize("backend", LIMITS)
def test_every_limit_can_be_broken_and_names_its_bound(backend):
    quantities = set(GOOD.quantities)
    for limit in LIMITS[backend]:
        assert limit.quantity in quantities
        assert limit.text
        assert not limit.allows(10**9 + 7)


@pytest.mark.parametrize(
    ("backend", "changes", "words"),
    [
        ("local", {"ranks": 2, "slots": 288}, "ranks = 2 must be at most 1"),
        ("shm", {"nodes": 2}, "nodes = 2 must be at most 1 (its ranks share memory)"),
        ("shm", {"ranks": 2, "slots": 2 * 65537}, "slots per rank = 65537 must be at most 65536"),
        ("deepep_normal", {"ranks": 5, "slots": 290}, "ranks = 5 must be one of 2, 4, 8"),
        ("deepep_normal", {"ranks": 168, "slots": 336}, "ranks = 168"),
        ("deepep_normal", {"nodes": 5}, "nodes beyond one per 8 ranks = 1 must be at most 0 (ranks 8n to"),
        ("deepep_normal", {"ranks": 8, "nodes": 2}, "nodes beyond one per 8 ranks = 1"),
        ("deepep_normal", {"slots": 289}, "slots modulo ranks = 1 must be at most 0"),
        ("deepep_normal", {"row_bytes": 7176}, "row bytes = 7176 must be a multiple of 16"),
        ("deepep_low_latency", {"ranks": 9, "slots": 288}, "ranks = 9"),
        ("deepep_low_latency", {"hidden": 2880}, "hidden = 2880 must be one of 2048, 2560"),
        ("deepep_low_latency", {"hidden": 1536}, "hidden = 1536"),
        ("deepep_low_latency", {"top_k": 12}, "top_k = 12 must be at most 11"),
        ("deepep_low_latency", {"max_tokens": 512}, "max_tokens = 512 must be at most 511"),
        (
            "deepep_low_latency",
            {"ranks": 3, "max_tokens": 7},
            "ranks x max_tokens = 21 must be a multiple of 4",
        ),
        ("deepep_low_latency", {"ranks": 1, "slots": 1025}, "slots per rank = 1025"),
        ("deepep_elastic", {"ranks": 1032, "slots": 2064}, "slots = 2064 must be at most 2048"),
        ("deepep_elastic", {"top_k": 33}, "top_k = 33"),
        ("deepep_elastic", {"hidden": 7296}, "hidden = 7296 must be a multiple of 256"),
    ],
)
def test_hard_limits(backend, changes, words):
    assert any(words in message for message in broken(backend, **changes))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7, 8, 64, 256])
def test_low_latency_rank_counts(ranks):
    assert broken("deepep_low_latency", ranks=ranks, slots=288 * ranks if 288 % ranks else 288) == []


def test_tested_limits_are_told_apart():
    assert broken("deepep_low_latency", max_tokens=256) == []
    assert broken("deepep_low_latency", kind="tested", max_tokens=256) == [
        "max_tokens = 256 must be at most 255 (the documentation says below 256)"
    ]
    assert broken("torch") == []
    assert broken("torch", kind="tested", ranks=9) == [
        "ranks = 9 must be at most 8 (what the test suite runs, over gloo on one host)"
    ]
    assert broken("shm", kind="tested", ranks=9) == ["ranks = 9 must be at most 8 (what the test suite runs)"]
    assert broken("torch", kind="tested", ranks=8) == broken("shm", kind="tested", ranks=8) == []


def test_unknown_backend():
    with pytest.raises(KeyError):
        violations("pigeon", GOOD)
