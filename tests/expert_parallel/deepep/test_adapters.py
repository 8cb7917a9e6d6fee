"""The DeepEP adapters over the double: every mode against the dense reference, within its stated bound."""

from itertools import product
from typing import Any

import pytest
import torch

from moe_runtime.errors import PlanError
from moe_runtime.expert_parallel.deepep.modes import open_buffers
from moe_runtime.expert_parallel.deepep.shape import Shape
from moe_runtime.spec.limits import DISPATCH_MODES, DispatchMode
from tests.expert_parallel.deepep.deepep_ranks import (
    batch,
    bound,
    build,
    dense,
    exchange,
    experts,
    run_ranks,
)
from tests.expert_parallel.deepep.double.library import double_library

torch.set_num_threads(1)

HIDDEN = {"normal": 64, "low_latency": 2048, "elastic": 256}


def shape_of(mode, ranks, *, slots_per_rank=3, top_k=4, max_tokens=8, hidden=None, **more):
    hidden = hidden or HIDDEN[mode]
    return Shape(
        ranks=ranks,
        slots_per_rank=slots_per_rank,
        hidden=hidden,
        top_k=top_k,
        max_tokens=max_tokens,
        **more,
    )


def check(mode, shape, tokens, *, rounds=1, **batch_options):
    """All ranks exchange `rounds` batches; every result is within the bound of the dense sum."""

    def work(group):
        buffer = build(mode, shape, group)
        results = []
        for i in range(rounds):
            b = batch(shape, tokens[group.rank()], seed=100 * i + group.rank(), **batch_options)
            rows, got = exchange(buffer, b, rank=group.rank())
            results.append((b, got, int(rows.counts.sum())))
        totals = buffer.meter.take()
        buffer.close()
        return results, totals

    outcomes = run_ranks(shape.ranks, work)
    for results, _ in outcomes:
        for b, got, _ in results:
            assert got.dtype == torch.bfloat16
            total, size = dense(b, shape, mode)
            error = (got.double() - total).abs()
            assert got.shape == b.x_TH.shape
            assert bool((error <= bound(mode, total, size, shape)).all()), float(error.max())
    for i in range(rounds):
        pairs = sum(int((results[i][0].slot_ids_TK >= 0).sum()) for results, _ in outcomes)
        assert sum(results[i][2] for results, _ in outcomes) == pairs
    for results, totals in outcomes:
        assert totals.received_rows == [count for _, _, count in results]
    return outcomes


@pytest.mark.parametrize("payload", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [("normal", r) for r in (2, 4, 8)] + list(product(("low_latency", "elastic"), range(1, 9))),
)
def test_every_number_of_ranks(mode, ranks, payload):
    hidden = 128 if mode == "normal" else None
    shape = shape_of(mode, ranks, slots_per_rank=5, payload=payload, hidden=hidden)
    check(mode, shape, [(3 * r + 1) % 8 for r in range(ranks)], drop=0.2)


def test_steps_of_either_mode_in_turn_with_two_in_flight():
    """One group, both buffers of a deployment that chooses per step, one meter."""
    shape = shape_of("low_latency", 4)
    steps: tuple[DispatchMode, ...] = ("normal", "low_latency", "low_latency", "normal", "low_latency")

    def work(group):
        rank = group.rank()
        buffers: Any = open_buffers(double_library(), shape, group=group, modes=DISPATCH_MODES)
        results, received = [], []
        for number, mode in enumerate(steps):
            buffer = buffers[mode]
            halves = [batch(shape, (rank + 3 * i) % 8, seed=10 * number + i) for i in range(2)]
            sent = [buffer.dispatch(b.x_TH, b.slot_ids_TK, b.weights_TK) for b in halves]
            rows = [s.wait() for s in sent]
            received += [int(r.counts.sum()) for r in rows]
            combining = [buffer.combine(experts(r, rank=rank, shape=shape), r) for r in rows]
            results += [(mode, b, c.wait()) for b, c in zip(halves, combining, strict=True)]
        assert buffers["normal"].meter.take().received_rows == received
        return results

    for results in run_ranks(4, work):
        for mode, b, got in results:
            total, size = dense(b, shape, mode)
            assert bool(((got.double() - total).abs() <= bound(mode, total, size, shape)).all())


@pytest.mark.parametrize("top_k", range(1, 12))
@pytest.mark.parametrize("mode", HIDDEN)
def test_every_top_k(mode, top_k):
    check(mode, shape_of(mode, 2, slots_per_rank=6, top_k=top_k), [3, 2])


@pytest.mark.parametrize(
    ("mode", "hidden"),
    [("normal", h) for h in (8, 64, 2880, 7168)]
    + [("low_latency", h) for h in (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)]
    + [("elastic", h) for h in (256, 2816, 7168)],
)
def test_every_hidden_size(mode, hidden):
    check(mode, shape_of(mode, 2, hidden=hidden, max_tokens=4), [2, 1])


@pytest.mark.parametrize("mode", HIDDEN)
@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (0, 7, 0, 1), (8, 8, 8, 8)])
def test_some_ranks_have_nothing(mode, tokens):
    check(mode, shape_of(mode, 4), tokens)


@pytest.mark.parametrize("mode", HIDDEN)
def test_all_tokens_to_one_expert(mode):
    check(mode, shape_of(mode, 4, top_k=1), [8, 8, 8, 8], only_slots=1)


@pytest.mark.parametrize("mode", HIDDEN)
def test_a_token_that_goes_nowhere_comes_back_as_zero(mode):
    outcomes = check(mode, shape_of(mode, 2), [4, 4], drop=1.0)
    for results, _ in outcomes:
        assert not results[0][1].any()


@pytest.mark.parametrize("mode", HIDDEN)
def test_many_rounds_reuse_the_buffers(mode):
    check(mode, shape_of(mode, 2), [8, 5], rounds=9)


@pytest.mark.parametrize("mode", HIDDEN)
def test_two_micro_batches_in_flight(mode):
    """Both dispatched before either is combined, the results of both within the bound."""
    shape = shape_of(mode, 4)

    def work(group):
        rank, buffer = group.rank(), build(mode, shape, group)
        results = []
        for step in range(3):
            batches = [batch(shape, 5, seed=10 * step + 4 * i + rank) for i in range(2)]
            sent = [buffer.dispatch(b.x_TH, b.slot_ids_TK, b.weights_TK) for b in batches]
            combined = []
            for s in sent:
                rows = s.wait()
                combined.append(buffer.combine(experts(rows, rank=rank, shape=shape), rows))
            results += [(b, c.wait()) for b, c in zip(batches, combined, strict=True)]
        return results

    for results in run_ranks(4, work):
        for b, got in results:
            total, size = dense(b, shape, mode)
            assert bool(((got.double() - total).abs() <= bound(mode, total, size, shape)).all())


@pytest.mark.parametrize("mode", ["normal", "elastic"])
@pytest.mark.parametrize("alignment", [1, 16, 128])
def test_groups_start_aligned_and_gaps_are_zero(mode, alignment):
    shape = shape_of(mode, 2)

    def work(group):
        buffer = build(mode, shape, group, alignment=alignment)
        b = batch(shape, 7, seed=group.rank())
        rows, got = exchange(buffer, b, rank=group.rank())
        return b, rows, got

    for b, rows, got in run_ranks(2, work):
        starts, counts = rows.starts.tolist(), rows.counts.tolist()
        assert all(s % alignment == 0 for s in starts)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            end = starts[i + 1] if i + 1 < len(starts) else -(-(start + count) // alignment) * alignment
            assert not rows.x[start + count : end].any()
            assert bool(rows.x[start : start + count].abs().sum(1).all())
        total, size = dense(b, shape, mode)
        assert bool(((got.double() - total).abs() <= bound(mode, total, size, shape)).all())


@pytest.mark.parametrize("mode", ["normal", "elastic"])
def test_rows_come_in_order_of_source_rank_and_token(mode):
    """In V2 only when asked for: its kernels place rows as they arrive."""
    shape = shape_of(mode, 4, slots_per_rank=2, top_k=2)

    def work(group):
        more: dict[str, Any] = {"deterministic": True} if mode == "elastic" else {}
        buffer = build(mode, shape, group, **more)
        b = batch(shape, 6, seed=group.rank())
        b.x_TH[:] = torch.arange(6)[:, None] + 8 * group.rank()
        rows = buffer.dispatch(b.x_TH, b.slot_ids_TK, b.weights_TK).wait()
        buffer.combine(torch.zeros_like(rows.x), rows).wait()
        return b.slot_ids_TK, rows

    outcomes = run_ranks(4, work)
    for rank, (_, rows) in enumerate(outcomes):
        for i in range(2):
            expected = [
                8 * source + t
                for source, (ids, _) in enumerate(outcomes)
                for t in range(6)
                if rank * 2 + i in ids[t].tolist()
            ]
            start, count = int(rows.starts[i]), int(rows.counts[i])
            assert rows.x[start : start + count, 0].tolist() == expected


@pytest.mark.parametrize(("mode", "bits"), [("normal", "float8_e4m3"), ("elastic", "bfloat16")])
def test_bytes_of_de_duplicated_dispatches(mode, bits):
    """Rows on the wire are the (token, other rank) pairs, no more."""
    shape = shape_of(mode, 4, payload=bits, hidden=256, slots_per_rank=8, top_k=8)
    outcomes = check(mode, shape, [5, 6, 7, 8])
    per_row = 256 + 8 if shape.fp8 else 512
    header = 8 * 12 if mode == "normal" else 25 * 4
    for rank, (results, totals) in enumerate(outcomes):
        ids = results[0][0].slot_ids_TK
        pairs = sum(len({int(s) // 8 for s in row} - {rank}) for row in ids)
        assert totals.rows_dispatched == pairs
        assert totals.bytes_dispatched == pairs * (per_row + header)
    returned = sum(totals.bytes_combined for _, totals in outcomes)
    assert returned == sum(totals.rows_dispatched for _, totals in outcomes) * 512


def test_low_latency_rows_travel_once_per_slot():
    shape = shape_of("low_latency", 4, slots_per_rank=8, top_k=8, payload="float8_e4m3")
    outcomes = check("low_latency", shape, [5, 6, 7, 8])
    for rank, (results, totals) in enumerate(outcomes):
        ids = results[0][0].slot_ids_TK
        pairs = int((ids // 8 != rank).sum())
        assert totals.bytes_dispatched == pairs * (2048 + 16 * 4 + 16)


@pytest.mark.parametrize(
    ("mode", "changes", "words"),
    [
        ("normal", {"ranks": 3}, "ranks = 3 must be one of 2, 4, 8"),
        ("normal", {"ranks": 1}, "ranks = 1 must be"),
        ("normal", {"hidden": 12}, "row bytes = 24 must be a multiple of 16"),
        ("normal", {"hidden": 64, "payload": "float8_e4m3"}, "hidden in fp8 = 64 must be a multiple of 128"),
        ("normal", {"top_k": 33}, "top_k = 33 must be at most 32"),
        ("normal", {"slots_per_rank": 1025}, "slots per rank = 1025"),
        ("low_latency", {"hidden": 2880}, "hidden = 2880 must be one of 2048"),
        ("low_latency", {"top_k": 12}, "top_k = 12 must be at most 11"),
        ("low_latency", {"ranks": 9}, "ranks = 9 must be one of"),
        ("low_latency", {"ranks": 3, "max_tokens": 6}, "ranks x max_tokens = 18 must be a multiple of 4"),
        ("low_latency", {"max_tokens": 512}, "max_tokens = 512 must be at most 511"),
        ("elastic", {"hidden": 384}, "hidden = 384 must be a multiple of 256"),
        ("elastic", {"top_k": 33}, "top_k = 33 must be at most 32"),
        ("elastic", {"slots_per_rank": 257}, "slots per rank = 257 must be at most 256"),
        ("elastic", {"ranks": 272, "slots_per_rank": 1}, "nodes = 34 must be at most 32"),
        ("normal", {"dtype": torch.float32}, "rows are torch.float32, DeepEP carries torch.bfloat16"),
    ],
)
def test_what_a_mode_cannot_do_is_refused_by_name(mode, changes, words):
    shape = shape_of(mode, **{"ranks": 4, **changes})
    with pytest.raises(PlanError, match="dispatch.backend") as caught:
        shape.require(f"deepep_{mode}")
    assert words in str(caught.value)


def test_an_adapter_refuses_before_it_builds_anything():
    group: Any = None
    with pytest.raises(PlanError, match="hidden = 64 must be one of"):
        build("low_latency", shape_of("low_latency", 4, hidden=64), group)


def test_ep_320_is_beyond_what_was_tested_and_runs():
    shape = shape_of("low_latency", 320, slots_per_rank=1, top_k=8, hidden=7168, max_tokens=128)
    shape.require("deepep_low_latency")
    assert shape.warnings("deepep_low_latency") == ("ranks = 320 must be at most 256",)
