"""Sizes of the models that kernels are compiled and timed for: the kernels' one list of shapes.

Of the models' published config.json files. Kernels import nothing of the rest, so these sizes stand in
`spec.catalog` as well; a test compares the two.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one model as kernels see them.

    expert_weights: the published format of the experts' weights
    MLA models: latent_rank, rope_dim, nope_dim, value_dim; GQA models: kv_heads, head_dim
    """

    name: str
    hidden: int
    expert_intermediate: int
    experts: int
    top_k: int
    groups: int
    kept_groups: int
    scoring: Literal["sigmoid", "softmax"]
    heads: int
    expert_weights: Literal["bf16", "fp8_block", "mxfp4", "int4"]
    latent_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    kv_heads: int = 0
    head_dim: int = 0


DEEPSEEK_V3 = ModelShape(
    name="DeepSeek-V3",
    hidden=7168,
    expert_intermediate=2048,
    experts=256,
    top_k=8,
    groups=8,
    kept_groups=4,
    scoring="sigmoid",
    heads=128,
    expert_weights="fp8_block",
    latent_rank=512,
    rope_dim=64,
    nope_dim=128,
    value_dim=128,
)
KIMI_K2 = ModelShape(
    name="Kimi-K2",
    hidden=7168,
    expert_intermediate=2048,
    experts=384,
    top_k=8,
    groups=1,
    kept_groups=1,
    scoring="sigmoid",
    heads=64,
    expert_weights="int4",
    latent_rank=512,
    rope_dim=64,
    nope_dim=128,
    value_dim=128,
)
QWEN3_235B = ModelShape(
    name="Qwen3-235B",
    hidden=4096,
    expert_intermediate=1536,
    experts=128,
    top_k=8,
    groups=1,
    kept_groups=1,
    scoring="softmax",
    heads=64,
    expert_weights="bf16",
    kv_heads=4,
    head_dim=128,
)
GLM_4_5 = ModelShape(
    name="GLM-4.5",
    hidden=5120,
    expert_intermediate=1536,
    experts=160,
    top_k=8,
    groups=1,
    kept_groups=1,
    scoring="sigmoid",
    heads=96,
    expert_weights="bf16",
    kv_heads=8,
    head_dim=128,
)
MODELS = (DEEPSEEK_V3, KIMI_K2, QWEN3_235B, GLM_4_5)
