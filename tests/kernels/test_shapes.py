"""The sizes that kernels are compiled for against the catalog of models, which kernels may not import."""

from typing import Any

import pytest

from moe_runtime.kernels import shapes
from moe_runtime.spec.catalog import CATALOG
from moe_runtime.spec.model import GqaSpec, MlaSpec, ModelSpec

NAMES = {
    "deepseek-v3": shapes.DEEPSEEK_V3,
    "kimi-k2": shapes.KIMI_K2,
    "qwen3-235b": shapes.QWEN3_235B,
    "glm-4.5": shapes.GLM_4_5,
}


def attention_sizes(a: MlaSpec | GqaSpec) -> dict[str, int]:
    if isinstance(a, GqaSpec):
        return {"heads": a.num_heads, "kv_heads": a.num_kv_heads, "head_dim": a.head_dim}
    return {
        "heads": a.num_heads,
        "latent_rank": a.kv_lora_rank,
        "rope_dim": a.qk_rope_head_dim,
        "nope_dim": a.qk_nope_head_dim,
        "value_dim": a.v_head_dim,
    }


def sizes(model: ModelSpec) -> dict[str, Any]:
    router = model.moe.router
    return {
        "hidden": model.hidden,
        "expert_intermediate": model.moe.intermediate,
        "experts": model.moe.num_experts,
        "top_k": router.top_k,
        "groups": router.num_groups,
        "kept_groups": router.kept_groups,
        "scoring": router.scoring,
        **attention_sizes(model.attention),
    }


def test_every_model_is_compared():
    assert tuple(NAMES.values()) == shapes.MODELS


@pytest.mark.parametrize("name", NAMES)
def test_the_catalog_has_the_same_sizes(name):
    catalogued = sizes(CATALOG[name])
    assert {field: getattr(NAMES[name], field) for field in catalogued} == catalogued
