"""Properties of step costs: sums, monotonicity, bounds; they hold for every model, mode and machine tried."""

import time
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.errors import InputError
from moe_runtime.spec.catalog import CATALOG, DEEPSEEK_V3, QWEN3_235B
from moe_runtime.virtual.cost.balance import Drift, draw_balance
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.links import normal_start
from moe_runtime.virtual.cost.loads import place, power_law
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.run import run_cost
from moe_runtime.virtual.cost.shapes import StepShape, decode_step, prefill_step

KNOWN = constants()
RANKS = 16
SKEW = power_law(8, 256, 0.6)
PLACED = place(SKEW, ranks=RANKS, ranks_per_node=8, redundant_experts=0, balanced=True)
BALANCE = draw_balance(SKEW, PLACED, top_k=8, drift=Drift(common=0.15, sequence=1.0), draws=4)
MACHINES = ("h100-sxm", "h20-96g", "gb200-nvl72", "mi300x")
MODELS = {
    (name, machine): CostModel(
        CATALOG[name],
        Setting(machine=machine, ranks=RANKS, slots_per_rank=-(-CATALOG[name].moe.num_experts // RANKS)),
        BALANCE,
    )
    for name in ("deepseek-v3", "qwen3-235b")
    for machine in MACHINES
}
models = st.sampled_from(sorted(MODELS))
per_rank = st.lists(st.integers(0, 300), min_size=RANKS, max_size=RANKS)
contexts = st.integers(1, 20_000)
splits = st.sampled_from([1, 2])
modes = st.sampled_from(["normal", "low_latency"])


@st.composite
def shapes(draw) -> StepShape:
    sequences = np.array(draw(per_rank), float)
    tokens = np.array(draw(per_rank), float) * draw(st.sampled_from([0, 1, 20]))
    prefix = draw(st.integers(0, 4096))
    return StepShape(
        decode_sequences_R=sequences,
        decode_context_R=sequences * draw(contexts),
        prefill_tokens_R=tokens,
        prefill_pairs_R=tokens * (prefix + (tokens + 1) / 2),
        prefill_prefix_R=np.where(tokens > 0, prefix, 0.0),
        queries=draw(st.sampled_from([1, 2])),
        mode=draw(modes),
        micro_batches=draw(splits),
        rounds=draw(st.sampled_from([1, 1, 3])),
    )


@settings(max_examples=60, deadline=None)
@given(models, shapes())
def test_parts_and_bounds_sum_to_the_step(name, shape):
    cost = MODELS[name].step(shape)
    assert cost.seconds > 0
    assert sum(cost.parts.values()) == pytest.approx(cost.seconds)
    assert sum(cost.bounds.values()) == pytest.approx(cost.seconds)
    assert min(cost.parts.values()) >= -1e-9 * cost.seconds
    assert cost.exposed <= cost.communication * (1 + 1e-9) + 1e-12
    assert cost.communication <= cost.seconds * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(models, shapes(), st.integers(0, RANKS - 1), st.integers(1, 64))
def test_more_work_is_never_cheaper(name, shape, rank, more):
    one = np.zeros(RANKS)
    one[rank] = more
    before = MODELS[name].step(shape).seconds
    busier = replace(
        shape,
        decode_sequences_R=shape.decode_sequences_R + one,
        decode_context_R=shape.decode_context_R + one * 1000,
    )
    longer = replace(shape, decode_context_R=shape.decode_context_R + one * 1000)
    prompt = replace(
        shape,
        prefill_tokens_R=shape.prefill_tokens_R + one,
        prefill_pairs_R=shape.prefill_pairs_R + one * 100,
    )
    for larger in (busier, longer, prompt):
        assert MODELS[name].step(larger).seconds >= before * (1 - 1e-9)


FASTER = ("memory_bandwidth", "scaleup_bandwidth", "rdma_bandwidth", "flops")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FASTER), shapes())
def test_faster_hardware_is_never_slower(what, shape):
    machine = KNOWN.machines["h100-sxm"]
    value = getattr(machine.hardware, what)
    faster: Any = {k: v * 1.5 for k, v in value.items()} if what == "flops" else value * 1.5
    change: dict[str, Any] = {what: faster}
    hardware = replace(machine.hardware, **change)
    known = replace(KNOWN, machines=MappingProxyType({"h100-sxm": replace(machine, hardware=hardware)}))
    model = CostModel(
        DEEPSEEK_V3, Setting(machine="h100-sxm", ranks=RANKS, slots_per_rank=16), BALANCE, known=known
    )
    before = MODELS["deepseek-v3", "h100-sxm"].step(shape).seconds
    assert model.step(shape).seconds <= before * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(models, st.integers(1, 300), contexts, modes)
def test_overlap_is_never_below_the_busier_lane(name, sequences, context, mode):
    shape = decode_step(RANKS, sequences, context, mode=mode, micro_batches=2)
    cost = MODELS[name].step(shape)
    assert cost.seconds >= cost.communication * (1 - 1e-9)
    assert cost.seconds >= cost.seconds - cost.exposed


def test_the_longest_rank_is_what_all_wait_for():
    model = MODELS["deepseek-v3", "h100-sxm"]
    even = model.step(decode_step(RANKS, 64, 2000))
    context = np.full(RANKS, 2000.0)
    context[3] = 20_000
    uneven = model.step(decode_step(RANKS, 64, context))
    assert uneven.seconds > even.seconds
    grown = uneven.parts["imbalance"] - even.parts["imbalance"]
    assert grown == pytest.approx(uneven.seconds - even.seconds, rel=0.2)


def test_a_run_of_steps_is_the_sum_of_them():
    model = MODELS["deepseek-v3", "h100-sxm"]
    for split in (1, 2):
        shape = decode_step(RANKS, np.arange(RANKS) * 16.0, 1000, micro_batches=split)
        single = 0.0
        for step in range(300):
            grown = shape.decode_context_R + shape.decode_sequences_R * step
            single += model.step(replace(shape, decode_context_R=grown)).seconds
        run = run_cost(model, shape, 300)
        assert run.seconds == pytest.approx(single, rel=1e-5)
        assert sum(run.parts.values()) == pytest.approx(run.seconds)


def test_wide_expert_parallelism_pays_for_large_batches_and_not_for_small_ones():
    """16 GPUs: one tensor-parallel model against expert parallelism, the same sequences in both."""
    whole = CostModel(
        DEEPSEEK_V3,
        Setting(machine="h100-sxm", ranks=16, experts="tensor_parallel", tensor_parallel=16),
    )
    wide = MODELS["deepseek-v3", "h100-sxm"]
    assert whole.step(decode_step(1, 16, 2000)).seconds < wide.step(decode_step(16, 1, 2000)).seconds
    assert whole.step(decode_step(1, 4096, 500)).seconds > wide.step(decode_step(16, 256, 500)).seconds


def test_tensor_parallel_attention_shares_heads_and_pays_for_it():
    setting = Setting(machine="h100-sxm", ranks=16, slots_per_rank=16, tensor_parallel=2)
    pair = CostModel(DEEPSEEK_V3, setting, BALANCE).step(decode_step(8, 64, 8000))
    alone = MODELS["deepseek-v3", "h100-sxm"].step(decode_step(16, 32, 8000))
    assert pair.parts["collective"] > 0 == alone.parts["collective"]
    # Heads are sliced, latents are not: the same arithmetic, twice the bytes.
    assert alone.parts["attention"] < pair.parts["attention"] < 2 * alone.parts["attention"]
    gqa = Setting(machine="h100-sxm", ranks=16, slots_per_rank=8, tensor_parallel=4)
    sliced = CostModel(QWEN3_235B, gqa, BALANCE).step(decode_step(4, 128, 8000))
    whole = MODELS["qwen3-235b", "h100-sxm"].step(decode_step(16, 32, 8000))
    assert sliced.parts["attention"] == pytest.approx(
        whole.parts["attention"]
    )  # keys are sliced with the heads


def test_prefix_and_longer_prompts_cost_attention():
    model = MODELS["deepseek-v3", "h100-sxm"]
    short, long = (model.step(prefill_step(RANKS, 4096, n)) for n in (512, 4096))
    assert long.parts["attention"] > 3 * short.parts["attention"]
    assert long.parts["experts"] == short.parts["experts"]


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("split", [1, 2])
def test_rounds_pay_starts_and_read_the_experts_again(mode, split):
    model = MODELS["deepseek-v3", "h100-sxm"]
    one = decode_step(RANKS, 64 * split, 2000, mode=mode, micro_batches=split)
    once, twice, thrice = (model.step(replace(one, rounds=rounds)) for rounds in (1, 2, 3))
    assert once.seconds < twice.seconds < thrice.seconds
    # Sixteen slots of 44 million bytes in each of 58 layers, once more for each micro-batch.
    read = 58 * split * 16 * 44e6 / KNOWN.machines["h100-sxm"].hardware.memory_bandwidth
    experts = twice.parts["experts"] - once.parts["experts"]
    assert 0.8 * read < experts < 1.3 * read
    if split == 1:
        start = model.links.transfer(mode, 0, 0, 0) + model.links.transfer(mode, 1, 0, 0)
        assert twice.seconds - once.seconds > experts + 58 * start


def test_a_normal_mode_transfer_has_a_start_that_does_not_shrink_with_the_batch():
    model = MODELS["deepseek-v3", "h100-sxm"]
    starts = 2 * 58 * model.links.normal_start
    for tokens in (16, 4096):
        parts = model.step(prefill_step(RANKS, tokens, 4096)).parts
        assert parts["dispatch"] + parts["combine"] > starts
    assert starts > 0.9 * sum(
        model.step(prefill_step(RANKS, 16, 4096)).parts[p] for p in ("dispatch", "combine")
    )


@pytest.mark.parametrize("library", sorted(KNOWN.libraries))
def test_the_start_of_normal_mode_is_the_fitted_one_among_32_ranks_and_grows_with_them(library):
    start = KNOWN.fitted.normal_start
    found = [normal_start(start, KNOWN.libraries[library], ranks) for ranks in (8, 16, 32, 64, 128)]
    assert found[2] == pytest.approx(start)
    assert found == sorted(found)
    assert 0.2 * start < found[0] < 0.8 * start


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(InputError, match="rdma|RDMA"):
        CostModel(DEEPSEEK_V3, Setting(machine="gb200-nvl72", ranks=144))
    with pytest.raises(InputError, match="h100-sxm"):
        CostModel(DEEPSEEK_V3, Setting(machine="h101", ranks=8))
    with pytest.raises(InputError, match="deepep-v1"):
        CostModel(DEEPSEEK_V3, Setting(machine="h800", ranks=8, library="none"))
    with pytest.raises(InputError, match="tensor_parallel = 3"):
        Setting(machine="h800", ranks=8, tensor_parallel=3)


def test_a_step_takes_well_under_a_millisecond_of_the_host():
    model = MODELS["deepseek-v3", "h100-sxm"]
    shape = decode_step(RANKS, 128, 2000, micro_batches=2)
    model.step(shape)
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()
        for _ in range(100):
            model.step(shape)
        best = min(best, (time.process_time() - begin) / 100)
    assert best < 1e-3
