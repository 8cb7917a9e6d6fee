"""ModelSpecs that tests of plans and byte formulas share: two small ones and a published one."""

from dataclasses import replace

from moe_runtime.spec import catalog
from moe_runtime.spec.model import GqaSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec

SMALL_DEEPSEEK = ModelSpec(
    family="deepseek_v3",
    vocab_size=8192,
    hidden=512,
    num_layers=8,
    max_positions=4096,
    norm_eps=1e-6,
    attention=MlaSpec(
        num_heads=8,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    rope=RopeSpec(dim=64, theta=1e4, interleaved=True),
    moe=MoeSpec(
        num_experts=32,
        intermediate=256,
        shared_intermediate=256,
        router=RouterSpec(
            top_k=4,
            scoring="sigmoid",
            correction_bias=True,
            num_groups=4,
            kept_groups=2,
            masked_group_score=float("-inf"),
            scale=2.5,
        ),
    ),
    moe_layers=tuple(range(1, 8)),
    dense_intermediate=1024,
    tie_embeddings=False,
    dtype="float32",
    eos_token_ids=(1,),
)

SMALL_QWEN = ModelSpec(
    family="qwen3_moe",
    vocab_size=8192,
    hidden=512,
    num_layers=8,
    max_positions=4096,
    norm_eps=1e-6,
    attention=GqaSpec(num_heads=8, num_kv_heads=2, head_dim=64, qk_norm=True),
    rope=RopeSpec(dim=64, theta=1e4, interleaved=False),
    moe=MoeSpec(
        num_experts=32,
        intermediate=256,
        shared_intermediate=0,
        router=RouterSpec(top_k=4, scoring="softmax", correction_bias=False),
    ),
    moe_layers=tuple(range(8)),
    dense_intermediate=1024,
    tie_embeddings=True,
    dtype="bfloat16",
    eos_token_ids=(1,),
)

DEEPSEEK_V3 = replace(
    catalog.DEEPSEEK_V3,
    rope=RopeSpec(dim=64, theta=1e4, interleaved=True, factor=40.0, original_max_positions=4096),
    mtp_layers=0,
    quantization=None,
)
"""In bf16 and without its draft layer: round numbers of bytes."""
