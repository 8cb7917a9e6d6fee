"""Step times of measured steps and of the cost model."""

from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.spec.catalog import DEEPSEEK_V3
from moe_runtime.virtual.cluster.times import MeasuredTimes, ModelTimes, plain_cost
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.shapes import decode_step, prefill_step


def test_measured_times_are_means_and_the_nearest_where_none_was_measured():
    times = MeasuredTimes([(4, 0, 1.0), (4, 0, 3.0), (8, 16, 10.0)])
    assert times.step(decode_step(2, [4, 1], 10)).seconds == 2.0
    assert times.step(decode_step(2, [5, 1], 10)).seconds == 2.0
    assert times.step(prefill_step(2, [16, 1], 16)).seconds == 10.0
    cost, last = times.run(decode_step(2, 4, 10), 5)
    assert (cost.seconds, last.seconds) == (10.0, 2.0)
    assert plain_cost(2.0).parts["other"] == sum(plain_cost(2.0).bounds.values()) == 2.0


def test_runs_of_the_cost_model_are_sums_of_its_steps():
    times = ModelTimes(CostModel(DEEPSEEK_V3, Setting(machine="h800", ranks=16, slots_per_rank=16)))
    shape = decode_step(16, np.arange(16) * 8, 900)
    cost, last = times.run(shape, 40)
    singles = [
        times.step(replace(shape, decode_context_R=shape.decode_context_R + j * shape.decode_sequences_R))
        for j in range(40)
    ]
    assert cost.seconds == pytest.approx(sum(s.seconds for s in singles), rel=1e-5)
    assert last == singles[-1]
