"""The roofline: computed by hand, agreed with the kernels' own operations, and never above a step's time."""

from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.spec.catalog import CATALOG
from moe_runtime.virtual.cost.balance import EVEN_BALANCE
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.cost.deployment import Precision, Setting
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.roofline import Roofline
from moe_runtime.virtual.cost.rows import LayerKernels
from moe_runtime.virtual.cost.run import run_cost
from moe_runtime.virtual.cost.shapes import decode_step, prefill_step
from moe_runtime.virtual.cost.work import Rates

DEEPSEEK, QWEN = CATALOG["deepseek-v3"], CATALOG["qwen3-235b"]
H100 = constants().machine("h100-sxm").hardware


def test_memory_of_a_small_decode_batch_by_hand():
    """One sequence a rank of Qwen3-235B on 8 H100, bf16: all weights but the experts, read once."""
    bf16 = Precision(dense="bfloat16", experts="bfloat16", dispatch="bfloat16")
    setting = Setting(machine="h100-sxm", ranks=8, slots_per_rank=16, precision=bf16)
    attention = 4096 * 128 * (64 + 2 * 4) + 4096 * 64 * 128
    expert = 3 * 4096 * 1536
    active = 16 * (1 - np.exp(-8 / 16))
    weights = 94 * (attention + 4096 * 128 + active * expert) + 151936 * 4096
    cache = 94 * 1000 * 2 * 4 * 128
    expected = 2 * (weights + cache) / 3.35e12
    ideal = Roofline(QWEN, setting, H100).seconds(decode_step(8, 1, 1000))
    assert ideal == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("model", [DEEPSEEK, QWEN], ids=["mla", "gqa"])
def test_arithmetic_is_that_of_the_kernels_without_their_losses(model):
    """A long prefill: every product at the peak, whole tiles, nothing for starts."""
    known = constants()
    setting = Setting(machine="h100-sxm", ranks=32, slots_per_rank=model.moe.num_experts // 32)
    lossless = replace(
        known.kernels,
        best_share=1.0, half_k=0.0, power=1.0, prefill_compute_share=1.0, prefill_tile=0, grouped_tile=0,
    )  # fmt: skip
    k = LayerKernels(
        model=model,
        precision=setting.precision,
        rates=Rates(hardware=H100, kernels=lossless, fitted=known.fitted),
    )
    shape = prefill_step(32, 16384, 4096)
    rows, pairs = 16384.0, float(shape.prefill_pairs_R[0])
    slots = float(setting.slots_per_rank)
    layer = [k.project(rows), k.output(rows), k.router(rows), k.expand(rows), k.prefill_core(pairs, rows)]
    moe = [k.mlp(rows, model.moe.shared_intermediate), k.experts(rows * 8, slots, masked=False)]
    dense = k.mlp(rows, model.dense_intermediate)
    expected = model.num_layers * sum(float(w.compute) for w in layer)
    expected += model.num_moe_layers * sum(float(w.compute) for w in moe)
    expected += (model.num_layers - model.num_moe_layers) * float(dense.compute)
    # The router's scores are summed in a streaming kernel, too, and the head samples one row a rank.
    expected += float(k.head(1.0).compute)
    assert Roofline(model, setting, H100).seconds(shape) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("sequences", [0, 1, 64, 256])
@pytest.mark.parametrize("ranks", [1, 72])
def test_no_step_is_faster_than_its_roofline(ranks, sequences, batches):
    setting = Setting(machine="h100-sxm", ranks=ranks, slots_per_rank=256 // min(ranks, 64))
    model = CostModel(DEEPSEEK, setting, EVEN_BALANCE)
    cost = model.step(decode_step(ranks, sequences, 2000, micro_batches=batches))
    assert 0 < cost.ideal <= cost.seconds
    prefill = model.step(prefill_step(ranks, 64 * max(sequences, 1), 4096, micro_batches=batches))
    assert 0 < prefill.ideal <= prefill.seconds


def test_runs_of_steps_sum_their_rooflines():
    setting = Setting(machine="h100-sxm", ranks=8, slots_per_rank=32)
    model = CostModel(DEEPSEEK, setting, EVEN_BALANCE)
    shape = decode_step(8, 32, 1000)
    steps = [
        model.step(replace(shape, decode_context_R=shape.decode_context_R + 32.0 * s)) for s in range(50)
    ]
    assert run_cost(model, shape, 50).ideal == pytest.approx(sum(s.ideal for s in steps), rel=1e-6)
