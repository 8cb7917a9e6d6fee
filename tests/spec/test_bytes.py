"""Byte and parameter formulas against tensor lists, published totals and operators' figures."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from moe_runtime.models.families.registry import tensor_targets
from moe_runtime.placement import placement
from moe_runtime.spec.bytes import (
    all_to_all_dispatch_bytes,
    even_redundant_experts,
    local_dispatch_bytes,
    masked_rows_bytes,
    parameter_counts,
    replicated_weight_bytes,
    shared_memory_dispatch_bytes,
    slot_bytes,
    slots_per_rank,
    surplus_slots,
    wire_row_bytes,
    workspace_bytes,
)
from moe_runtime.spec.catalog import QWEN3_30B
from moe_runtime.spec.model import DTYPE_BYTES, GqaSpec, MlaSpec, ModelSpec, serve_shared_in_slots
from tests.spec.model_specs import DEEPSEEK_V3, SMALL_DEEPSEEK, SMALL_QWEN


def without_q_lora(model: ModelSpec) -> ModelSpec:
    assert isinstance(model.attention, MlaSpec)
    return replace(model, attention=replace(model.attention, q_lora_rank=0))


VARIANTS = {
    "deepseek": SMALL_DEEPSEEK,
    "deepseek without q_lora": without_q_lora(SMALL_DEEPSEEK),
    "deepseek without shared experts": replace(
        SMALL_DEEPSEEK, moe=replace(SMALL_DEEPSEEK.moe, shared_intermediate=0)
    ),
    "deepseek, two shared experts in slots": serve_shared_in_slots(
        replace(SMALL_DEEPSEEK, moe=replace(SMALL_DEEPSEEK.moe, shared_intermediate=512))
    ),
    "deepseek tied": replace(SMALL_DEEPSEEK, tie_embeddings=True),
    "qwen tied": SMALL_QWEN,
    "qwen untied, some dense layers": replace(SMALL_QWEN, tie_embeddings=False, moe_layers=(0, 2, 3, 6)),
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_30b": QWEN3_30B,
}


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_counts_are_those_of_the_tensors(model: ModelSpec):
    targets = tensor_targets(model)
    counts = parameter_counts(model)
    replicated = sum(prod(t.used_shape) for t in targets if t.expert is None and not t.fp32)
    biases = sum(prod(t.used_shape) for t in targets if t.fp32)
    one_expert = sum(prod(t.used_shape) for t in targets if t.expert == 0 and t.moe_layer == 0)
    assert counts.replicated == replicated
    assert counts.replicated_fp32 == biases
    assert counts.expert == one_expert
    assert counts.num_experts == len({(t.moe_layer, t.expert) for t in targets if t.expert is not None})
    assert counts.total == sum(prod(t.used_shape) for t in targets)


def test_published_totals():
    deepseek = parameter_counts(DEEPSEEK_V3)
    assert deepseek.total == 671_026_419_200
    assert deepseek.active == pytest.approx(37e9, rel=0.02)
    qwen = parameter_counts(QWEN3_30B)
    assert qwen.total == pytest.approx(30.5e9, rel=0.01)
    assert qwen.active == pytest.approx(3.3e9, rel=0.03)


def test_biases_of_attention_projections_count():
    plain = QWEN3_30B.attention
    assert isinstance(plain, GqaSpec)
    biased = replace(QWEN3_30B, attention=replace(plain, qkv_bias=True))
    added = parameter_counts(biased).total - parameter_counts(QWEN3_30B).total
    assert added == 48 * (32 + 4 + 4) * 128


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_bytes_keep_biases_in_fp32(dtype):
    counts = parameter_counts(SMALL_DEEPSEEK)
    size = DTYPE_BYTES[dtype]
    assert replicated_weight_bytes(SMALL_DEEPSEEK, dtype) == counts.replicated * size + 7 * 32 * 4
    assert slot_bytes(SMALL_DEEPSEEK, dtype) == 7 * 3 * 512 * 256 * size


@pytest.mark.parametrize(
    ("experts", "ranks", "least"),
    [(256, 3, 2), (256, 6, 2), (256, 24, 8), (256, 144, 32), (72, 5, 3), (384, 16, 0)],
)
def test_least_redundancy_that_divides(experts, ranks, least):
    assert even_redundant_experts(experts, 0, ranks) == least
    assert even_redundant_experts(experts, least, ranks) == least
    assert surplus_slots(experts, least, ranks) == 0


@pytest.mark.parametrize(
    ("ranks", "redundant"),
    [(r, n) for r in (1, 2, 3, 4, 7, 32) for n in (0, 1, 8, 33) if n <= 32 * (r - 1)],
)
def test_slots_are_those_of_the_linear_placement(ranks, redundant):
    table = placement.linear(num_layers=1, num_experts=32, num_ranks=ranks, redundant_experts=redundant)
    assert slots_per_rank(32, redundant, ranks) == table.slots_per_rank
    assert surplus_slots(32, redundant, ranks) == int(np.sum(table.slot_to_expert_LS == -1))


def test_dispatch_bytes():
    assert local_dispatch_bytes(max_tokens=10, top_k=4, hidden=8, dtype_bytes=2) == 2 * 40 * 8 * 2
    sizes = {
        "max_tokens": 10,
        "top_k": 4,
        "ranks": 3,
        "dispatch_row": 8,
        "combine_row": 16,
    }
    # Packed 10, sent to 3 ranks each, received 30; with two local slots a token has at most two rows.
    assert all_to_all_dispatch_bytes(**sizes, local_slots=2) == (10 + 30 + 30 + 60) * 8 + (120 + 40) * 16
    assert all_to_all_dispatch_bytes(**sizes, local_slots=9) == (10 + 30 + 30 + 120) * 8 + (240 + 40) * 16
    area = 10 * 4 * 16
    assert shared_memory_dispatch_bytes(**sizes, local_slots=2) == 4 * area + 60 * (8 + 16)
    wide = {**sizes, "dispatch_row": 80}
    assert shared_memory_dispatch_bytes(**wide, local_slots=2) == 4 * 10 * (80 + 16) + 60 * (80 + 16)


def test_masked_rows_have_a_place_for_every_row_of_every_rank_in_each_slot():
    sizes = {"max_tokens": 10, "ranks": 3, "local_slots": 5}
    assert masked_rows_bytes(**sizes, dispatch_row=8, combine_row=16) == 5 * 30 * (8 + 16)


def test_shared_experts_in_slots_are_the_same_parameters():
    for model in (SMALL_DEEPSEEK, DEEPSEEK_V3):
        served = serve_shared_in_slots(model)
        assert (served.moe.slot_experts, served.moe.slots_per_token) == (
            model.moe.num_experts + 1,
            model.moe.router.top_k + 1,
        )
        plain, slots = parameter_counts(model), parameter_counts(served)
        assert (slots.total, slots.active) == (plain.total, plain.active)
        assert plain.replicated - slots.replicated == model.num_moe_layers * slots.expert
    assert serve_shared_in_slots(SMALL_QWEN) == SMALL_QWEN
    odd = replace(SMALL_DEEPSEEK, moe=replace(SMALL_DEEPSEEK.moe, shared_intermediate=300))
    with pytest.raises(ValueError, match="300 are no multiple of 256"):
        serve_shared_in_slots(odd)


def test_rows_on_the_wire():
    assert [wire_row_bytes(512, d) for d in ("float32", "bfloat16", "float8_e4m3")] == [2048, 1024, 528]


@pytest.mark.parametrize("model", [SMALL_DEEPSEEK, SMALL_QWEN], ids=["mla", "gqa"])
def test_workspace_grows_with_each_number(model):
    sizes = {"batch_tokens": 64, "sequences": 8, "context_tokens": 128}
    base = workspace_bytes(model, dtype="float32", **sizes)
    for name, value in sizes.items():
        assert workspace_bytes(model, dtype="float32", **{**sizes, name: 2 * value}) > base
    logits = 8 * model.vocab_size * 4
    assert 2 * (workspace_bytes(model, dtype="bfloat16", **sizes) - logits) == base - logits
