"""DeepSeek-V3 and the models built on it (R1, Kimi-K2): config.json -> ModelSpec -> tensor targets.

Owns the family's field and tensor names. Numerics follow transformers' modeling_deepseek_v3.
"""

from collections.abc import Iterator, Sequence

from moe_runtime.models.families import common
from moe_runtime.models.families.fields import ConfigFields
from moe_runtime.models.families.rope import rope_spec
from moe_runtime.spec.model import MlaSpec, ModelSpec, MoeSpec, RouterSpec
from moe_runtime.spec.weights import TensorTarget

NAME = "deepseek_v3"
ARCHITECTURES = ("DeepseekV3ForCausalLM",)
MODEL_TYPES = ("deepseek_v3", "kimi_k2")


def spec_from_config(fields: ConfigFields, *, dtype: str | None, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    """The normal form of a config. CheckpointError for what is missing, wrong or not supported."""
    fields.only("hidden_act", ("silu",), default="silu")
    fields.only("attention_bias", (False,), default=False)
    usual = common.usual_fields(fields, dtype)
    attention = _attention(fields)
    moe = _moe(fields)
    first_dense = fields.integer("first_k_dense_replace", minimum=0)
    frequency = fields.integer("moe_layer_freq", default=1)
    return ModelSpec(
        family=NAME,
        attention=attention,
        rope=rope_spec(
            fields,
            dim=attention.qk_rope_head_dim,
            interleaved=fields.flag("rope_interleave", default=True),
            max_positions=usual["max_positions"],
            scale_softmax=True,
        ),
        moe=moe,
        moe_layers=tuple(i for i in range(first_dense, usual["num_layers"]) if i % frequency == 0),
        eos_token_ids=eos_token_ids,
        mtp_layers=fields.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0),
        **usual,
    )


def _attention(fields: ConfigFields) -> MlaSpec:
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", default=heads) != heads:
        raise fields.error("num_key_value_heads", f"must equal num_attention_heads = {heads}")
    return MlaSpec(
        num_heads=heads,
        q_lora_rank=fields.integer("q_lora_rank", default=0, minimum=0),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )


def _moe(fields: ConfigFields) -> MoeSpec:
    fields.only("scoring_func", ("sigmoid",), default="sigmoid")
    fields.only("topk_method", ("noaux_tc",), default="noaux_tc")
    experts = fields.integer("n_routed_experts", "num_local_experts", maximum=common.MOST_EXPERTS)
    groups = fields.integer("n_group", default=1)
    kept = fields.integer("topk_group", default=1)
    top_k = fields.integer("num_experts_per_tok")
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise fields.error("n_group", f"= {groups} must divide {experts} experts into groups of at least 2")
    if kept > groups:
        raise fields.error("topk_group", f"= {kept} must not exceed n_group = {groups}")
    if top_k > experts // groups * kept:
        raise fields.error(
            "num_experts_per_tok", f"= {top_k} must not exceed the {experts // groups * kept} experts kept"
        )
    intermediate = fields.integer("moe_intermediate_size")
    router = RouterSpec(
        top_k=top_k,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=groups,
        kept_groups=kept,
        masked_group_score=float("-inf"),
        normalize=fields.flag("norm_topk_prob"),
        weight_epsilon=1e-20,
        scale=fields.number("routed_scaling_factor"),
    )
    return MoeSpec(
        num_experts=experts,
        intermediate=intermediate,
        shared_intermediate=intermediate * fields.integer("n_shared_experts", default=0, minimum=0),
        router=router,
    )


def tensor_targets(spec: ModelSpec) -> Iterator[TensorTarget]:
    """Every checkpoint tensor the model needs, in checkpoint order."""
    return common.model_targets(spec, _attention_tensors)


def _attention_tensors(spec: ModelSpec) -> Sequence[common.AttentionTensor]:
    a = spec.attention
    assert isinstance(a, MlaSpec)
    q_rows, kv_a_rows = a.num_heads * a.qk_head_dim, a.kv_lora_rank + a.qk_rope_head_dim
    rows: list[common.AttentionTensor]
    if a.q_lora_rank:
        rows = [
            ("q_a_proj", (a.q_lora_rank, spec.hidden), "qkv_a_proj", 0),
            ("q_a_layernorm", (a.q_lora_rank,), "q_a_norm", 0),
            ("q_b_proj", (q_rows, a.q_lora_rank), "q_b_proj", 0),
            ("kv_a_proj_with_mqa", (kv_a_rows, spec.hidden), "qkv_a_proj", a.q_lora_rank),
        ]
    else:
        rows = [
            ("q_proj", (q_rows, spec.hidden), "q_proj", 0),
            ("kv_a_proj_with_mqa", (kv_a_rows, spec.hidden), "kv_a_proj", 0),
        ]
    rows += [
        ("kv_a_layernorm", (a.kv_lora_rank,), "kv_a_norm", 0),
        ("kv_b_proj", (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank), "kv_b_proj", 0),
        ("o_proj", (spec.hidden, a.num_heads * a.v_head_dim), "o_proj", 0),
    ]
    return rows
