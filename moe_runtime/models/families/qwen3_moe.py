"""Qwen3-MoE: config.json -> ModelSpec -> tensor targets.

Owns the family's field and tensor names. Numerics follow transformers' modeling_qwen3_moe.
"""

from collections.abc import Iterator, Sequence

from moe_runtime.models.families import common
from moe_runtime.models.families.fields import ConfigFields
from moe_runtime.models.families.rope import rope_spec
from moe_runtime.spec.model import GqaSpec, ModelSpec, MoeSpec, RouterSpec
from moe_runtime.spec.weights import TensorTarget

NAME = "qwen3_moe"
ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)


def spec_from_config(fields: ConfigFields, *, dtype: str | None, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    """The normal form of a config. CheckpointError for what is missing, wrong or not supported."""
    fields.only("hidden_act", ("silu",), default="silu")
    fields.only("attention_bias", (False,), default=False)
    fields.only("use_sliding_window", (False,), default=False)
    usual = common.usual_fields(fields, dtype)
    attention = _attention(fields)
    return ModelSpec(
        family=NAME,
        attention=attention,
        rope=rope_spec(
            fields,
            dim=attention.head_dim,
            interleaved=False,
            max_positions=usual["max_positions"],
            scale_softmax=False,
        ),
        moe=_moe(fields),
        moe_layers=_moe_layers(fields, usual["num_layers"]),
        eos_token_ids=eos_token_ids,
        **usual,
    )


def _attention(fields: ConfigFields) -> GqaSpec:
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"= {kv_heads} must divide num_attention_heads = {heads}")
    head_dim = fields.integer("head_dim", default=fields.integer("hidden_size") // heads)
    return GqaSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, qk_norm=True)


def _moe(fields: ConfigFields) -> MoeSpec:
    experts = fields.integer("num_experts", "num_local_experts", maximum=common.MOST_EXPERTS)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"= {top_k} must not exceed {experts} experts")
    router = RouterSpec(
        top_k=top_k, scoring="softmax", correction_bias=False, normalize=fields.flag("norm_topk_prob")
    )
    return MoeSpec(
        num_experts=experts,
        intermediate=fields.integer("moe_intermediate_size"),
        shared_intermediate=0,
        router=router,
    )


def _moe_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    step, dense = fields.integer("decoder_sparse_step", default=1), fields.integers("mlp_only_layers")
    return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def tensor_targets(spec: ModelSpec) -> Iterator[TensorTarget]:
    """Every checkpoint tensor the model needs, in checkpoint order."""
    return common.model_targets(spec, _attention_tensors)


def _attention_tensors(spec: ModelSpec) -> Sequence[common.AttentionTensor]:
    a = spec.attention
    assert isinstance(a, GqaSpec)
    q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return (
        ("q_proj", (q_rows, spec.hidden), "qkv_proj", 0),
        ("k_proj", (kv_rows, spec.hidden), "qkv_proj", q_rows),
        ("v_proj", (kv_rows, spec.hidden), "qkv_proj", q_rows + kv_rows),
        ("q_norm", (a.head_dim,), "q_norm", 0),
        ("k_norm", (a.head_dim,), "k_norm", 0),
        ("o_proj", (spec.hidden, q_rows), "o_proj", 0),
    )
