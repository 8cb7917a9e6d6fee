"""What families share: the usual fields of a config, and the order and names of tensors but attention's.

Owns the hub's names of those fields and tensors; parameter names are those of `spec.weights`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moe_runtime.models.families.fields import ConfigFields
from moe_runtime.spec.model import DTYPE_BYTES, ModelSpec
from moe_runtime.spec.weights import TensorTarget

# Far beyond any model: what is written for each layer or expert would fill the memory.
MOST_LAYERS, MOST_EXPERTS = 4096, 65_536

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def weight_dtype(fields: ConfigFields, dtype: str | None) -> str:
    """The dtype to run in: `dtype` if given, else what the config says."""
    name = dtype or fields.text("dtype", "torch_dtype")
    name = name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise fields.error("dtype", f"= {name!r} is not supported, only {', '.join(DTYPE_BYTES)}")
    return name


# Hub name, shape, parameter, first row of the parameter that it fills.
AttentionTensor = tuple[str, tuple[int, ...], str, int]


def usual_fields(fields: ConfigFields, dtype: str | None) -> dict[str, Any]:
    """The arguments of a ModelSpec that every family reads from the same fields."""
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden": fields.integer("hidden_size"),
        "num_layers": fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        "max_positions": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps"),
        "dense_intermediate": fields.integer("intermediate_size"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dtype": weight_dtype(fields, dtype),
        "bos_token_id": fields.integer("bos_token_id", minimum=0) if fields.has("bos_token_id") else None,
    }


def model_targets(
    spec: ModelSpec, attention: Callable[[ModelSpec], Sequence[AttentionTensor]]
) -> Iterator[TensorTarget]:
    """Every tensor of a model, in checkpoint order; `attention` lists those of one layer's attention."""
    yield from outer_targets(spec)
    for layer in range(spec.num_layers):
        yield from norm_targets(spec, layer)
        for name, shape, parameter, row_start in attention(spec):
            yield TensorTarget(
                source=f"model.layers.{layer}.self_attn.{name}.weight",
                shape=shape,
                parameter=f"layers.{layer}.attention.{parameter}.weight",
                row_start=row_start,
            )
        if layer in spec.moe_layers:
            yield from moe_targets(spec, layer)
        else:
            yield from mlp_targets(
                f"model.layers.{layer}.mlp", f"layers.{layer}.mlp", spec.hidden, spec.dense_intermediate
            )


def outer_targets(spec: ModelSpec) -> Iterator[TensorTarget]:
    """Embedding, final norm, and the output head unless it shares the embedding's tensor."""
    table = (spec.vocab_size, spec.hidden)
    yield TensorTarget(source="model.embed_tokens.weight", shape=table, parameter="embed.weight")
    yield TensorTarget(source="model.norm.weight", shape=(spec.hidden,), parameter="norm.weight")
    if not spec.tie_embeddings:
        yield TensorTarget(source="lm_head.weight", shape=table, parameter="lm_head.weight")


def norm_targets(spec: ModelSpec, layer: int) -> Iterator[TensorTarget]:
    """The two norms of a decoder layer."""
    for source, name in (
        ("input_layernorm", "input_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
    ):
        yield TensorTarget(
            source=f"model.layers.{layer}.{source}.weight",
            shape=(spec.hidden,),
            parameter=f"layers.{layer}.{name}.weight",
        )


def mlp_targets(source: str, parameter: str, hidden: int, intermediate: int) -> Iterator[TensorTarget]:
    """A gated MLP whose gate and up projections are rows of one parameter."""
    shape, gate_up = (intermediate, hidden), f"{parameter}.gate_up_proj.weight"
    yield TensorTarget(source=f"{source}.gate_proj.weight", shape=shape, parameter=gate_up)
    yield TensorTarget(
        source=f"{source}.up_proj.weight", shape=shape, parameter=gate_up, row_start=intermediate
    )
    yield TensorTarget(
        source=f"{source}.down_proj.weight",
        shape=(hidden, intermediate),
        parameter=f"{parameter}.down_proj.weight",
    )


def moe_targets(spec: ModelSpec, layer: int) -> Iterator[TensorTarget]:
    """Router, correction bias, shared experts and every expert of a MoE layer."""
    moe, source, parameter = spec.moe, f"model.layers.{layer}.mlp", f"layers.{layer}.moe"
    yield TensorTarget(
        source=f"{source}.gate.weight",
        shape=(moe.num_experts, spec.hidden),
        parameter=f"{parameter}.router.weight",
    )
    if moe.router.correction_bias:
        yield TensorTarget(
            source=f"{source}.gate.e_score_correction_bias",
            shape=(moe.num_experts,),
            parameter=f"{parameter}.router.correction_bias",
            fp32=True,
        )
    if moe.shared_intermediate:
        yield from mlp_targets(
            f"{source}.shared_experts", f"{parameter}.shared_experts", spec.hidden, moe.shared_intermediate
        )
    for expert in range(moe.num_experts):
        yield from _expert_targets(f"{source}.experts.{expert}", spec, layer, expert=expert)
    for part in range(moe.shared_slots):
        yield from _expert_targets(
            f"{source}.shared_experts", spec, layer, expert=moe.num_experts + part, part=part
        )


def _expert_targets(
    source: str, spec: ModelSpec, layer: int, *, expert: int, part: int | None = None
) -> Iterator[TensorTarget]:
    """One expert, or part number `part` of the shared experts, which checkpoints store as one MLP."""
    inter, hidden = spec.moe.intermediate, spec.hidden
    stored = inter if part is None else inter * spec.moe.shared_slots
    for name, axis, suffix, row in (
        ("gate_proj", 0, "gate_up", 0),
        ("up_proj", 0, "gate_up", inter),
        ("down_proj", 1, "down", 0),
    ):
        yield TensorTarget(
            source=f"{source}.{name}.weight",
            shape=(stored, hidden) if axis == 0 else (hidden, stored),
            parameter=f"layers.{layer}.moe.experts.{suffix}",
            row_start=row,
            part=None if part is None else (axis, part * inter, (part + 1) * inter),
            expert=expert,
            moe_layer=spec.moe_layers.index(layer),
        )


def skipped(spec: ModelSpec, name: str) -> bool:
    """Tensors a checkpoint may hold that this runtime knows and does not need.

    Layers of multi-token prediction, rotary frequencies of old exports, and an output head
    stored next to the embedding it is tied to.
    """
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return spec.tie_embeddings
    match = _LAYER.match(name)
    return match is not None and 0 <= int(match[1]) - spec.num_layers < spec.mtp_layers
