"""ModelSpec: the one normal form of a model, whatever its family calls things.

Owns the sizes and kinds a decoder is assembled from; knows nothing of torch, files or
ranks. Planner, memory budget, loader, model and simulator all read the same object.
"""

from dataclasses import dataclass, replace
from typing import Literal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention. `q_lora_rank` 0: queries are projected directly.

    The norms of the two latents have an epsilon of their own (DeepSeek fixes 1e-6).
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_entry(self) -> int:
        """Values cached per token and layer: latent, then the shared rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention; `qk_norm`: RMS norm over head_dim of q and k before RoPE."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    qkv_bias: bool = False

    @property
    def kv_entry(self) -> int:
        """Values cached per token and layer: all key heads, then all value heads."""
        return 2 * self.num_kv_heads * self.head_dim


AttentionSpec = MlaSpec | GqaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """How the weights of linear layers are stored where that is not the model's dtype.

    Values of `dtype`, and a float32 scale for each block of (rows, columns). Of attention, MLPs and experts;
    embeddings, logits, norms, routers and biases keep the model's dtype.
    """

    dtype: Literal["float8_e4m3"]
    block: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding over `dim` values of a head.

    `interleaved`: pairs are (2i, 2i+1), as DeepSeek stores them; otherwise (i, i + dim/2).
    YaRN (`factor` > 1) interpolates between `beta_fast` and `beta_slow` rotations of
    `original_max_positions`. `cos_sin_scale` multiplies cos and sin, `softmax_scale` the
    attention scale on top of qk_head_dim ** -0.5; the family computes both.
    """

    dim: int
    theta: float
    interleaved: bool
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    cos_sin_scale: float = 1.0
    softmax_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a token chooses `top_k` experts.

    Scores are computed in fp32. With `correction_bias` the choice uses score + bias and the
    weights the score alone. With `num_groups` > 1 only the `kept_groups` best groups take part
    (group score: sum of its two best for sigmoid, its best for softmax); the others are filled
    with `masked_group_score` (-inf in DeepSeek's code and in transformers 5; 0.0 in transformers 4).
    `weight_epsilon` is added to the sum when weights are normalised.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    correction_bias: bool
    num_groups: int = 1
    kept_groups: int = 1
    masked_group_score: float = float("-inf")
    normalize: bool = True
    weight_epsilon: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Sizes of the mixture-of-experts layers.

    num_experts          E: experts the router chooses from
    shared_intermediate  of the shared experts together, as one MLP beside the routed ones; 0: none
    shared_slots         shared experts served as slots: experts E, E + 1, ... that every token goes to with
                         weight 1 (see `serve_shared_in_slots`)
    """

    num_experts: int
    intermediate: int
    shared_intermediate: int
    router: RouterSpec
    shared_slots: int = 0

    @property
    def slot_experts(self) -> int:
        """Experts that sit in slots."""
        return self.num_experts + self.shared_slots

    @property
    def slots_per_token(self) -> int:
        """Slots a token goes to."""
        return self.router.top_k + self.shared_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything the runtime needs to know of a model besides its weights.

    `moe_layers` are the global indices of the layers that have experts; the others have a
    dense MLP of `dense_intermediate`. `quantization` None: all weights have the model's dtype.
    """

    family: str
    vocab_size: int
    hidden: int
    num_layers: int
    max_positions: int
    norm_eps: float
    attention: AttentionSpec
    rope: RopeSpec
    moe: MoeSpec
    moe_layers: tuple[int, ...]
    dense_intermediate: int
    tie_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    mtp_layers: int = 0
    quantization: QuantizationSpec | None = None

    @property
    def softmax_scale(self) -> float:
        """Factor on q.k before the softmax."""
        a = self.attention
        dim = a.qk_head_dim if isinstance(a, MlaSpec) else a.head_dim
        return float(dim**-0.5) * self.rope.softmax_scale

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    def weight_dtype(self, dtype: str) -> str:
        """Dtype of the linear layers' weights where the model computes in `dtype`."""
        return dtype if self.quantization is None else self.quantization.dtype


def serve_shared_in_slots(model: ModelSpec) -> ModelSpec:
    """The model with its shared experts as further experts of the routed ones' size, if it has any.

    A gated MLP of n times the size is the sum of n MLPs. ValueError if the size is no multiple.
    """
    moe = model.moe
    count, rest = divmod(moe.shared_intermediate, moe.intermediate)
    if rest:
        raise ValueError(f"shared experts of {moe.shared_intermediate} are no multiple of {moe.intermediate}")
    return replace(model, moe=replace(moe, shared_intermediate=0, shared_slots=count))
