"""Expert loads: real tokens only, each once, summed over ranks without waiting."""

import numpy as np
import torch

from moe_runtime.engine.balancing.load import ExpertLoad, WindowMeter
from moe_runtime.engine.balancing.merge import LoadMerge, step_balancedness
from moe_runtime.engine.balancing.wire import WindowLoads
from moe_runtime.expert_parallel.slot_table import SlotTable
from moe_runtime.kernels.registry import select
from moe_runtime.placement.placement import linear

CPU = torch.device("cpu")
LAYERS, EXPERTS = 2, 8


def rank(number: int, num_ranks: int, interval: int) -> tuple[ExpertLoad, SlotTable, WindowMeter]:
    load = ExpertLoad(LAYERS, EXPERTS, CPU)
    placement = linear(num_layers=LAYERS, num_experts=EXPERTS, num_ranks=num_ranks, redundant_experts=4)
    table = SlotTable(placement, source_rank=number, device=CPU, load_LE=load.counter_LE)
    return load, table, WindowMeter(load, rank=number, interval_tokens=interval)


def route(tokens: int, seed: int = 0) -> torch.Tensor:
    """Top-2 of `tokens` rows."""
    scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(2).indices


def run(table: SlotTable, tokens: int, seed: int = 0) -> None:
    for layer in range(LAYERS):
        table.layer(layer).choose(route(tokens, seed), None)  # type: ignore[arg-type]


def test_padding_is_not_counted():
    """5 real tokens padded to 8, top-2: 10 pairs, in the kernel of every device's choice."""
    for kind in ("reference", "cpu"):
        load, table, _ = rank(0, 2, 100)
        choose = select("choose_slots", kind)
        slots = choose(
            route(8),
            table.replica_start[0],
            table.replica_slots[0],
            table.cumulative[0],
            table.offset,
            real_tokens=torch.tensor([5], dtype=torch.int32),
            load_E=load.counter_LE[0],
        )
        assert load.pairs_LE.sum() == 10
        assert (slots[5:] == -1).all()
        assert load.pairs_LE[0].tolist() == np.bincount(route(8)[:5].flatten(), minlength=EXPERTS).tolist()


def test_warm_up_adds_nothing():
    load, table, meter = rank(0, 2, 4)
    run(table, 64)
    load.reset()
    run(table, 4)
    meter = WindowMeter(load, rank=0, interval_tokens=4)
    run(table, 3, seed=1)
    window = meter.after_step(rows=4, received_L=np.zeros(LAYERS, np.int64), expert_seconds=0.0)
    assert window is not None
    assert np.frombuffer(window.pairs, np.int64).sum() == LAYERS * 3 * 2
    assert load.recorded_LE.sum() == LAYERS * 7 * 2


def test_an_idle_rank_adds_nothing_and_two_ranks_add_up():
    """5 + 3 tokens of two data-parallel ranks, top-2: 16 pairs a layer, and a third rank that is idle."""
    merge, merged = LoadMerge(3, LAYERS, EXPERTS), []
    for number, tokens in enumerate((5, 3, 0)):
        _, table, meter = rank(number, 4, 8)
        run(table, tokens, seed=number)
        part = meter.after_step(rows=8, received_L=np.full(LAYERS, 2 * tokens), expert_seconds=0.5)
        assert part is not None
        merged += [merge.add(part), merge.add(part)]  # a message that comes twice counts once
    assert [m is None for m in merged] == [True] * 4 + [False, True]
    assert merged[4] is not None
    assert merged[4].pairs_LE.sum(axis=1).tolist() == [16] * LAYERS
    assert merged[4].seconds_per_pair == 1.5 / (16 * LAYERS)
    assert merged[4].balancedness_W.tolist() == [(16 / 3) / 10]


def test_windows_are_cut_by_agreed_rows_and_lose_nothing():
    load, table, meter = rank(0, 2, 10)
    cut = []
    for step in range(12):
        run(table, 3, seed=step)
        part = meter.after_step(rows=4, received_L=np.ones(LAYERS, np.int64), expert_seconds=0.0)
        if part is not None:
            cut.append((step, part.window, np.frombuffer(part.pairs, np.int64).sum()))
    assert cut == [(2, 0, 36), (5, 1, 36), (8, 2, 36), (11, 3, 36)]
    assert load.pairs_LE.sum() == 12 * 3 * 2 * LAYERS


def test_recording_is_apart_from_windows():
    load, table, _ = rank(0, 2, 10)
    run(table, 3)
    load.start()
    run(table, 4)
    load.stop()
    run(table, 5)
    assert load.recorded_LE.sum() == 4 * 2 * LAYERS
    load.start()
    assert load.recorded_LE.sum() == 0


def test_parts_may_come_in_any_order():
    merge = LoadMerge(2, 1, 2)

    def part(rank: int, window: int, pairs: list[int]) -> WindowLoads:
        received = np.array([[4]], np.int32).tobytes()
        data = np.array([pairs], np.int64).tobytes()
        return WindowLoads(rank=rank, window=window, pairs=data, received=received, expert_seconds=0.0)

    assert merge.add(part(0, 0, [1, 2])) is None
    assert merge.add(part(0, 1, [10, 20])) is None
    first, second = merge.add(part(1, 0, [3, 4])), merge.add(part(1, 1, [30, 40]))
    assert first is not None
    assert second is not None
    assert (first.window, first.pairs_LE.tolist()) == (0, [[4, 6]])
    assert (second.window, second.pairs_LE.tolist()) == (1, [[40, 60]])


def test_steps_without_rows_have_no_balancedness():
    received_RWL = np.array([[[4, 2], [0, 0]], [[2, 2], [0, 0]]], np.int32)
    assert step_balancedness(received_RWL).tolist() == [(0.75 + 1.0) / 2]
