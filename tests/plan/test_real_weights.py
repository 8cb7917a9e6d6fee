"""The budget's weights against the parameters a decoder really has on a rank."""

from pathlib import Path

import pytest
import torch

from moe_runtime.expert_parallel.local import LocalBuffer
from moe_runtime.expert_parallel.slot_table import SlotTable
from moe_runtime.models.decoder import build_decoder
from moe_runtime.placement.placement import linear
from moe_runtime.spec.model import ModelSpec
from tests.plan.plans import UNIFIED, checked
from tests.spec.model_specs import SMALL_DEEPSEEK, SMALL_QWEN


@pytest.mark.parametrize("model", [SMALL_DEEPSEEK, SMALL_QWEN], ids=["deepseek", "qwen"])
@pytest.mark.parametrize(("ranks", "redundant"), [(1, 0), (3, 0), (4, 8)])
def test_parameter_bytes_of_a_rank(tmp_path: Path, model: ModelSpec, ranks: int, redundant: int):
    sets = (
        f"deployments.unified.expert_parallel={ranks}",
        f"deployments.unified.redundant_experts={redundant}",
    )
    _, plan, (budget,) = checked(tmp_path, UNIFIED, *sets, model=model)
    placement = linear(
        num_layers=model.num_moe_layers, num_experts=32, num_ranks=ranks, redundant_experts=redundant
    )
    table = SlotTable(placement, source_rank=0, device=torch.device("cpu"))
    decoder = build_decoder(
        model,
        slots_per_rank=plan.deployment("unified").slots_per_rank,
        buffers={"normal": LocalBuffer(slots_per_rank=placement.slots_per_rank)},
        slot_tables=[table.layer(i) for i in range(model.num_moe_layers)],
        dtype=getattr(torch, plan.model.dtype),
        device=torch.device("cpu"),
    )
    tensors = decoder.tensors()
    experts = sum(t.nbytes for name, t in tensors.items() if ".moe.experts." in name)
    assert experts == budget.experts + budget.redundant_experts
    assert sum(t.nbytes for t in tensors.values()) - experts == budget.shared_weights
