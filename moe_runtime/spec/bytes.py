"""Formulas for bytes and parameters: what a model, a dispatch buffer and a KV pool take.

Pure arithmetic on ModelSpec and integers; the buffers of DeepEP are in `deepep_bytes`. Owns no policy: which
numbers go in is the plan's business. H hidden, E experts, S slots, R ranks, K top-k, T tokens, V vocabulary,
I intermediate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_runtime.spec.model import DTYPE_BYTES, MlaSpec, ModelSpec

GIB = 2**30
FP8_BLOCK = 128
WIRE_BYTES: Mapping[str, int] = MappingProxyType({**DTYPE_BYTES, "float8_e4m3": 1})
"""Bytes of a value as dispatched or quantised, scales aside."""


def slots_per_rank(num_experts: int, redundant_experts: int, num_ranks: int) -> int:
    """ceil((E + redundant) / R): slots every rank has, per MoE layer."""
    return -(-(num_experts + redundant_experts) // num_ranks)


def surplus_slots(num_experts: int, redundant_experts: int, num_ranks: int) -> int:
    """Slots of all ranks that stay empty, per MoE layer: S - (E + redundant), below R."""
    return -(num_experts + redundant_experts) % num_ranks


def even_redundant_experts(num_experts: int, redundant_experts: int, num_ranks: int) -> int:
    """The least redundant_experts >= the given that leave no slot surplus."""
    return redundant_experts + surplus_slots(num_experts, redundant_experts, num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of a model, without multi-token-prediction layers.

    replicated       weights every rank holds, in the model's dtype
    replicated_fp32  the router's correction biases, float32 whatever the dtype
    expert           one routed expert of one MoE layer
    num_experts      experts in slots, of all layers together
    active           parameters one token meets (embedding row and head counted as whole tables)
    """

    replicated: int
    replicated_fp32: int
    expert: int
    num_experts: int
    active: int

    @property
    def total(self) -> int:
        return self.replicated + self.replicated_fp32 + self.expert * self.num_experts


def parameter_counts(model: ModelSpec) -> ParameterCounts:
    """Exact counts, tensor by tensor as `spec.weights` lists them."""
    moe, h = model.moe, model.hidden
    moe_layers = model.num_moe_layers
    outer = model.vocab_size * h * (1 if model.tie_embeddings else 2) + h
    per_layer = attention_parameters(model) + 2 * h
    dense = (model.num_layers - moe_layers) * 3 * h * model.dense_intermediate
    routed_layers = moe_layers * (moe.num_experts * h + 3 * h * moe.shared_intermediate)
    replicated = outer + model.num_layers * per_layer + dense + routed_layers
    biases = moe_layers * moe.num_experts if moe.router.correction_bias else 0
    expert = 3 * h * moe.intermediate
    return ParameterCounts(
        replicated=replicated,
        replicated_fp32=biases,
        expert=expert,
        num_experts=moe_layers * moe.slot_experts,
        active=replicated + biases + moe_layers * moe.slots_per_token * expert,
    )


def attention_matrices(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of one layer's projections, as a checkpoint stores them."""
    a, h = model.attention, model.hidden
    if isinstance(a, MlaSpec):
        queries = a.num_heads * a.qk_head_dim
        q = ((a.q_lora_rank, h), (queries, a.q_lora_rank)) if a.q_lora_rank else ((queries, h),)
        kv_b = a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
        return (*q, (a.kv_entry, h), (kv_b, a.kv_lora_rank), (h, a.num_heads * a.v_head_dim))
    heads, kv_heads = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return ((heads, h), (kv_heads, h), (kv_heads, h), (h, heads))


def attention_parameters(model: ModelSpec) -> int:
    """Parameters of one layer's attention: projections, latent or head norms, biases."""
    a, projections = model.attention, sum(n * k for n, k in attention_matrices(model))
    if isinstance(a, MlaSpec):
        return projections + a.q_lora_rank + a.kv_lora_rank
    norms = 2 * a.head_dim if a.qk_norm else 0
    bias = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim if a.qkv_bias else 0
    return projections + bias + norms


def mlp_matrices(model: ModelSpec, intermediate: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of a gated MLP: gate, up, down; none of size 0."""
    h = model.hidden
    return ((intermediate, h), (intermediate, h), (h, intermediate)) if intermediate else ()


def replicated_weight_bytes(model: ModelSpec, dtype: str) -> int:
    """Bytes of the weights every rank holds: all but the experts in slots.

    `dtype` is that of weights which are not quantised.
    """
    counts, moe = parameter_counts(model), model.moe
    whole = counts.replicated * DTYPE_BYTES[dtype] + counts.replicated_fp32 * DTYPE_BYTES["float32"]
    dense = model.num_layers - model.num_moe_layers
    return (
        whole
        - model.num_layers * _saved(model, dtype, attention_matrices(model))
        - dense * _saved(model, dtype, mlp_matrices(model, model.dense_intermediate))
        - model.num_moe_layers * _saved(model, dtype, mlp_matrices(model, moe.shared_intermediate))
    )


def attention_weight_bytes(model: ModelSpec, dtype: str) -> int:
    """Of `replicated_weight_bytes`, what attention has in all layers."""
    one = attention_parameters(model) * DTYPE_BYTES[dtype]
    return model.num_layers * (one - _saved(model, dtype, attention_matrices(model)))


def slot_bytes(model: ModelSpec, dtype: str) -> int:
    """Bytes of one slot in all MoE layers together: gate, up and down of one expert per layer."""
    expert = parameter_counts(model).expert * DTYPE_BYTES[dtype]
    saved = _saved(model, dtype, mlp_matrices(model, model.moe.intermediate))
    return model.num_moe_layers * (expert - saved)


def draft_bytes(model: ModelSpec, dtype: str) -> tuple[int, int]:
    """Multi-token prediction: bytes of (what every rank holds, one slot), all draft layers together.

    A draft layer is a MoE layer, a projection [H, 2H] in `dtype` of the joined norms of embedding and hidden
    state, and a norm before the logits; embedding and logits are the model's own (DeepSeek-V3 report, 2.2).
    """
    moe, h, size = model.moe, model.hidden, DTYPE_BYTES[dtype]
    shared = mlp_matrices(model, moe.shared_intermediate)
    parameters = attention_parameters(model) + moe.num_experts * h + sum(n * k for n, k in shared)
    parameters += 2 * h * h + 5 * h
    saved = _saved(model, dtype, attention_matrices(model)) + _saved(model, dtype, shared)
    biases = moe.num_experts * DTYPE_BYTES["float32"] if moe.router.correction_bias else 0
    layers, slot = model.mtp_layers, slot_bytes(model, dtype) // model.num_moe_layers
    return layers * (parameters * size - saved + biases), layers * slot


def _saved(model: ModelSpec, dtype: str, matrices: Iterable[tuple[int, int]]) -> int:
    """Bytes by which quantised matrices, scales included, are smaller than in `dtype`."""
    q = model.quantization
    if q is None:
        return 0
    rows, columns = q.block
    smaller = DTYPE_BYTES[dtype] - WIRE_BYTES[q.dtype]
    return sum(n * k * smaller - 4 * -(-n // rows) * -(-k // columns) for n, k in matrices)


def local_dispatch_bytes(*, max_tokens: int, top_k: int, hidden: int, dtype_bytes: int) -> int:
    """EP degree 1: the rows sorted by slot, and the experts' outputs. T x K rows each."""
    return 2 * max_tokens * top_k * hidden * dtype_bytes


def wire_row_bytes(hidden: int, dtype: str) -> int:
    """One row as dispatched; fp8 rows carry a float32 scale per `FP8_BLOCK` values."""
    scales = hidden // FP8_BLOCK if dtype == "float8_e4m3" else 0
    return hidden * WIRE_BYTES[dtype] + 4 * scales


def all_to_all_dispatch_bytes(
    *, max_tokens: int, top_k: int, ranks: int, local_slots: int, dispatch_row: int, combine_row: int
) -> int:
    """One round of an all-to-all without capacity factor, at its worst; bytes of rows are given.

    Packs T rows and sends each once to each of at most min(K, R) ranks. Receives at most R x T rows,
    when every rank's tokens all choose this rank, and spreads them over R x T x min(K, local slots)
    for the slots. Holds as many outputs twice, the second time in the order in which they travel
    back, and gets T x K rows back.
    """
    sent = max_tokens * (1 + min(top_k, ranks))
    spread = ranks * max_tokens * min(top_k, local_slots)
    received = ranks * max_tokens + spread
    return (sent + received) * dispatch_row + (2 * spread + max_tokens * top_k) * combine_row


def shared_memory_dispatch_bytes(
    *, max_tokens: int, top_k: int, ranks: int, local_slots: int, dispatch_row: int, combine_row: int
) -> int:
    """One rank's part of the `shm` backend at its worst; bytes of rows are given.

    Four areas (two transfers in flight, each with a successor), each large enough for T published rows
    with their slot ids and for T x K returned ones; and R x T x min(K, local slots) rows as received and
    as outputs, outside of the shared memory.
    """
    area = max(max_tokens * (dispatch_row + 4 * top_k), max_tokens * top_k * combine_row)
    spread = ranks * max_tokens * min(top_k, local_slots)
    return 4 * area + spread * (dispatch_row + combine_row)


def masked_rows_bytes(
    *, max_tokens: int, ranks: int, local_slots: int, dispatch_row: int, combine_row: int
) -> int:
    """Low-latency mode over a transport that groups rows: R x T places per slot, for rows and for outputs."""
    return local_slots * ranks * max_tokens * (dispatch_row + combine_row)


def workspace_bytes(
    model: ModelSpec, *, dtype: str, batch_tokens: int, sequences: int, context_tokens: int
) -> int:
    """An estimate of the largest activations alive at once in a step of one rank.

    Residual and normed rows (4 T H); queries and attention outputs of T rows; keys and values of
    one sequence of `context_tokens` in expanded form; the wider of the gated MLPs' intermediates
    (dense: T rows, experts: T K rows); float32 logits of all sequences. Allocator slack is not in it.
    """
    a, moe, h, t = model.attention, model.moe, model.hidden, batch_tokens
    if isinstance(a, MlaSpec):
        per_token = a.num_heads * (a.qk_head_dim + a.v_head_dim)
        absorbed = sequences * a.num_heads * (a.kv_entry + a.kv_lora_rank)
        attention = t * per_token + context_tokens * per_token + absorbed
    else:
        attention = 2 * t * a.num_heads * a.head_dim + context_tokens * a.kv_entry
    widest = max(
        t * max(model.dense_intermediate, moe.shared_intermediate), t * moe.slots_per_token * moe.intermediate
    )
    values = 4 * t * h + attention + 3 * widest
    return values * DTYPE_BYTES[dtype] + sequences * model.vocab_size * DTYPE_BYTES["float32"]
