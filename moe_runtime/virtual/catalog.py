"""Sizes of well-known models, so that one can plan for a model without its checkpoint. Data only.

From the models' published configurations. RoPE is left at its plain form: no cost depends on it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from moe_runtime.spec.model import GqaSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec


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
)
QWEN3_235B = ModelSpec(
    family="qwen3_moe",
    vocab_size=151936,
    hidden=4096,
    num_layers=94,
    max_positions=40960,
    norm_eps=1e-6,
    attention=GqaSpec(num_heads=64, num_kv_heads=4, head_dim=128, qk_norm=True),
    rope=RopeSpec(dim=128, theta=1e6, interleaved=False),
    moe=MoeSpec(
        num_experts=128,
        intermediate=1536,
        shared_intermediate=0,
        router=RouterSpec(top_k=8, scoring="softmax", correction_bias=False),
    ),
    moe_layers=tuple(range(94)),
    dense_intermediate=12288,
    tie_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=(151645,),
)
GLM_4_5 = ModelSpec(
    family="glm4_moe",
    vocab_size=151552,
    hidden=5120,
    num_layers=92,
    max_positions=131072,
    norm_eps=1e-5,
    attention=GqaSpec(num_heads=96, num_kv_heads=8, head_dim=128, qk_norm=True, qkv_bias=True),
    rope=RopeSpec(dim=64, theta=1e6, interleaved=False),
    moe=MoeSpec(num_experts=160, intermediate=1536, shared_intermediate=1536, router=_sigmoid(1, 1, 2.5)),
    moe_layers=tuple(range(3, 92)),
    dense_intermediate=12288,
    tie_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=(151329,),
    mtp_layers=1,
)

CATALOG: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "deepseek-v3": DEEPSEEK_V3,
        "kimi-k2": KIMI_K2,
        "qwen3-235b": QWEN3_235B,
        "glm-4.5": GLM_4_5,
    }
)
