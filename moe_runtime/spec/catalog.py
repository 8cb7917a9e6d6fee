"""Sizes of well-known models, so that one can plan for a model without its checkpoint. Data only.

A plan names one as `model: {path: "catalog:deepseek-v3"}`. From the models' published configurations, with
the precision their weights are published in; `-fp8` names the published quantised variant of a bf16 model.
RoPE is left at its plain form: neither bytes nor times depend on it.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moe_runtime.spec.model import (
    AttentionSpec,
    GqaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    QuantizationSpec,
    RopeSpec,
    RouterSpec,
)

PREFIX = "catalog:"
FP8_BLOCKS = QuantizationSpec(dtype="float8_e4m3", block=(128, 128))


def catalog_name(path: str) -> str | None:
    """The name that `model.path` gives of the catalog's models; None for a checkpoint's path."""
    return path.removeprefix(PREFIX) if path.startswith(PREFIX) else None


def _mla(num_heads: int) -> MlaSpec:
    return MlaSpec(
        num_heads=num_heads,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


def _sigmoid(num_groups: int, kept_groups: int, scale: float) -> RouterSpec:
    return RouterSpec(
        top_k=8,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=num_groups,
        kept_groups=kept_groups,
        weight_epsilon=1e-20,
        scale=scale,
    )


DEEPSEEK_V3 = ModelSpec(
    family="deepseek_v3",
    vocab_size=129280,
    hidden=7168,
    num_layers=61,
    max_positions=163840,
    norm_eps=1e-6,
    attention=_mla(128),
    rope=RopeSpec(dim=64, theta=1e4, interleaved=True),
    moe=MoeSpec(num_experts=256, intermediate=2048, shared_intermediate=2048, router=_sigmoid(8, 4, 2.5)),
    moe_layers=tuple(range(3, 61)),
    dense_intermediate=18432,
    tie_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=(1,),
    mtp_layers=1,
    quantization=FP8_BLOCKS,
)
KIMI_K2 = ModelSpec(
    family="deepseek_v3",
    vocab_size=163840,
    hidden=7168,
    num_layers=61,
    max_positions=131072,
    norm_eps=1e-6,
    attention=_mla(64),
    rope=RopeSpec(dim=64, theta=5e4, interleaved=True),
    moe=MoeSpec(num_experts=384, intermediate=2048, shared_intermediate=2048, router=_sigmoid(1, 1, 2.827)),
    moe_layers=tuple(range(1, 61)),
    dense_intermediate=18432,
    tie_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=(163585,),
    quantization=FP8_BLOCKS,
)


def _qwen3(
    *, hidden: int, layers: int, num_heads: int, intermediate: int, dense_intermediate: int
) -> ModelSpec:
    return ModelSpec(
        family="qwen3_moe",
        vocab_size=151936,
        hidden=hidden,
        num_layers=layers,
        max_positions=40960,
        norm_eps=1e-6,
        attention=GqaSpec(num_heads=num_heads, num_kv_heads=4, head_dim=128, qk_norm=True),
        rope=RopeSpec(dim=128, theta=1e6, interleaved=False),
        moe=MoeSpec(
            num_experts=128,
            intermediate=intermediate,
            shared_intermediate=0,
            router=RouterSpec(top_k=8, scoring="softmax", correction_bias=False),
        ),
        moe_layers=tuple(range(layers)),
        dense_intermediate=dense_intermediate,
        tie_embeddings=False,
        dtype="bfloat16",
        eos_token_ids=(151645,),
    )


QWEN3_235B = _qwen3(hidden=4096, layers=94, num_heads=64, intermediate=1536, dense_intermediate=12288)
QWEN3_30B = _qwen3(hidden=2048, layers=48, num_heads=32, intermediate=768, dense_intermediate=6144)


def _glm(
    *,
    hidden: int,
    layers: int,
    first: int,
    experts: int,
    intermediate: int,
    dense_intermediate: int,
    attention: AttentionSpec,
    scale: float,
) -> ModelSpec:
    return ModelSpec(
        family="glm4_moe",
        vocab_size=151552,
        hidden=hidden,
        num_layers=layers,
        max_positions=131072,
        norm_eps=1e-5,
        attention=attention,
        rope=RopeSpec(dim=64, theta=1e6, interleaved=False),
        moe=MoeSpec(
            num_experts=experts,
            intermediate=intermediate,
            shared_intermediate=intermediate,
            router=_sigmoid(1, 1, scale),
        ),
        moe_layers=tuple(range(first, layers)),
        dense_intermediate=dense_intermediate,
        tie_embeddings=False,
        dtype="bfloat16",
        eos_token_ids=(151329,),
        mtp_layers=1,
    )


GLM_4_5 = _glm(
    hidden=5120,
    layers=92,
    first=3,
    experts=160,
    intermediate=1536,
    dense_intermediate=12288,
    attention=GqaSpec(num_heads=96, num_kv_heads=8, head_dim=128, qk_norm=True, qkv_bias=True),
    scale=2.5,
)
GLM_4_5_AIR = _glm(
    hidden=4096,
    layers=46,
    first=1,
    experts=128,
    intermediate=1408,
    dense_intermediate=10944,
    attention=GqaSpec(num_heads=96, num_kv_heads=8, head_dim=128, qk_norm=False, qkv_bias=True),
    scale=1.0,
)


def _fp8(model: ModelSpec) -> ModelSpec:
    return replace(model, quantization=FP8_BLOCKS)


CATALOG: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "deepseek-v3": DEEPSEEK_V3,
        "deepseek-r1": DEEPSEEK_V3,
        "kimi-k2": KIMI_K2,
        "qwen3-235b": QWEN3_235B,
        "qwen3-235b-fp8": _fp8(QWEN3_235B),
        "qwen3-30b": QWEN3_30B,
        "qwen3-30b-fp8": _fp8(QWEN3_30B),
        "glm-4.5": GLM_4_5,
        "glm-4.5-fp8": _fp8(GLM_4_5),
        "glm-4.5-air": GLM_4_5_AIR,
        "glm-4.5-air-fp8": _fp8(GLM_4_5_AIR),
    }
)
