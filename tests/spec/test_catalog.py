"""The catalog: published sizes, and bytes of quantised weights counted tensor by tensor."""

from dataclasses import replace
from math import prod

import pytest

from moe_runtime.models.families.registry import tensor_targets
from moe_runtime.spec.bytes import (
    draft_bytes,
    parameter_counts,
    replicated_weight_bytes,
    slot_bytes,
)
from moe_runtime.spec.catalog import CATALOG, DEEPSEEK_V3, KIMI_K2, PREFIX, QWEN3_235B, catalog_name
from moe_runtime.spec.model import ModelSpec

BILLIONS = {
    "deepseek-v3": (671, 37),
    "deepseek-r1": (671, 37),
    "kimi-k2": (1026, 32),
    "qwen3-235b": (235, 22),
    "qwen3-30b": (30.5, 3.3),
    "glm-4.5": (355, 32),
    "glm-4.5-air": (106, 12),
}
UNQUANTISED = ("embed_tokens", "lm_head", "norm", ".gate.")


@pytest.mark.parametrize("name", CATALOG)
def test_sizes_are_the_published_ones(name: str):
    total, active = BILLIONS[name.removesuffix("-fp8")]
    counts = parameter_counts(CATALOG[name])
    assert counts.total == pytest.approx(total * 1e9, rel=0.01)
    assert counts.active == pytest.approx(active * 1e9, rel=0.12)  # embeddings and logits are in ours


def test_names():
    assert catalog_name(PREFIX + "kimi-k2") == "kimi-k2"
    assert catalog_name("./catalog:kimi-k2") is None
    for name, model in CATALOG.items():
        quantised = name.endswith("-fp8") or name in ("deepseek-v3", "deepseek-r1", "kimi-k2")
        assert (model.quantization is not None) == quantised
        assert model.weight_dtype("bfloat16") == ("float8_e4m3" if quantised else "bfloat16")


def tensor_bytes(model: ModelSpec, source: str, shape: tuple[int, ...]) -> int:
    """As a checkpoint in fp8 blocks of 128 x 128 stores it."""
    if len(shape) < 2 or any(part in source for part in UNQUANTISED):
        return prod(shape) * 2
    n, k = shape
    return n * k + 4 * -(-n // 128) * -(-k // 128)


@pytest.mark.parametrize(
    "model", [DEEPSEEK_V3, KIMI_K2, CATALOG["qwen3-235b-fp8"]], ids=["deepseek", "kimi", "qwen"]
)
def test_quantised_bytes_are_those_of_the_tensors(model: ModelSpec):
    targets = tensor_targets(model)
    replicated = sum(
        prod(t.shape) * 4 if t.fp32 else tensor_bytes(model, t.source, t.shape)
        for t in targets
        if t.expert is None
    )
    expert = sum(tensor_bytes(model, t.source, t.shape) for t in targets if t.expert == 0)
    assert replicated_weight_bytes(model, "bfloat16") == replicated
    assert slot_bytes(model, "bfloat16") == expert


def test_quantised_weights_are_about_half_and_activations_as_before():
    whole = replace(DEEPSEEK_V3, quantization=None)
    assert slot_bytes(DEEPSEEK_V3, "bfloat16") * 2 == pytest.approx(slot_bytes(whole, "bfloat16"), rel=1e-3)
    assert slot_bytes(CATALOG["qwen3-235b-fp8"], "bfloat16") < slot_bytes(QWEN3_235B, "bfloat16")
    assert parameter_counts(whole) == parameter_counts(DEEPSEEK_V3)


def test_draft_layers_have_the_published_size():
    """DeepSeek-V3's draft layer has 11.5 G parameters of its own (README of its weights)."""
    whole = replace(DEEPSEEK_V3, quantization=None)
    replicated, slot = draft_bytes(whole, "bfloat16")
    assert (replicated + 256 * slot) / 2 == pytest.approx(11.5e9, rel=0.01)
    assert draft_bytes(KIMI_K2, "bfloat16") == (0, 0)
    assert draft_bytes(DEEPSEEK_V3, "bfloat16") < (replicated, slot)
