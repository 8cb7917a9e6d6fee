"""Formulas for bytes and parameters: what a model, a dispatch buffer and a KV pool take.

Pure arithmetic on ModelSpec and integers. Owns no policy: which numbers go in is the plan's
business. H hidden, E experts, S slots, R ranks, K top-k, T tokens, V vocabulary, I intermediate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_runtime.spec.model import DTYPE_BYTES, MlaSpec, ModelSpec

GIB = 2**30
FP8_BLOCK = 128
WIRE_BYTES: Mapping[str, int] = MappingProxyType({**DTYPE_BYTES, "float8_e4m3": 1})
"""Bytes of a value as dispatched or quantised, scales aside."""
LOW_LATENCY_LIMIT_BYTES = 32 * GIB
"""Size beyond which operators found DeepEP's low-latency buffer refused."""


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


def _align(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def low_latency_buffer_bytes(*, max_tokens: int, hidden: int, slots: int) -> int:
    """DeepEP's low-latency buffer: 4 E M (H/128 x 4 + 2H) + 2 align128(4E).

    E counts physical experts, redundant ones included; independent of R. Two ping-pong buffers
    of a send and a receive half. Source: `get_low_latency_rdma_size_hint`, DeepEP 2.1.0.
    """
    row = hidden // 128 * 4 + 2 * hidden
    return 4 * slots * max_tokens * row + 2 * _align(4 * slots, 128)


# Channels and chunk sizes of DeepEP's tuned configurations with 20 SMs: ranks -> the larger of
# dispatch and combine: (NVLink receive tokens, RDMA send tokens that its ring is a multiple of).
_NORMAL_CHANNELS = 10
_NORMAL_CHUNKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {r: (256, 6) for r in (2, 4, 8)}
    | {16: (288, 20)}
    | {r: (288, 8) for r in (24, 32, 48, 64)}
    | {96: (480, 12), 128: (560, 12), 144: (720, 12), 160: (720, 12)}
)


def normal_buffer_bytes(*, hidden: int, ranks: int) -> tuple[int, int]:
    """(NVLink bytes, RDMA bytes) of DeepEP's normal mode; KeyError for ranks without configuration.

    Per channel and peer: queue offsets, and chunks of rows with 8 bytes of source, room for 128 top-k
    ids (int64), weights and scales. RDMA keeps everything twice (send and receive) and 16 bytes more
    per row; 0 within a node. Rows in bf16. Source: `Config.get_nvl_buffer_size_hint` and
    `get_rdma_buffer_size_hint` over both tuned configurations, DeepEP 2.1.0.
    """
    nodes, peers = max(ranks // 8, 1), min(ranks, 8)
    nvlink_rows, rdma_send = _NORMAL_CHUNKS[ranks]
    row = 2 * hidden + 8 + 128 * (8 + 4 + 4)
    nvlink = _NORMAL_CHANNELS * peers * ((2 * nodes + 3) * 4 + nvlink_rows * row)
    if ranks <= 8:
        return _align(nvlink, 128), 0
    rdma_rows = _align(128, rdma_send)
    rdma = _NORMAL_CHANNELS * nodes * ((2 * 8 + 2) * 2 * 4 + rdma_rows * 2 * (row + 16))
    return _align(nvlink, 128), _align(rdma, 128)


def elastic_buffer_bytes(
    *, max_tokens: int, hidden: int, top_k: int, ranks: int, ranks_per_node: int, fp8: bool
) -> int:
    """Bytes of DeepEP's `ElasticBuffer` with several reductions allowed, a multiple of 2 MiB.

    The larger of what a dispatch and a combine hold. Within a node rows go straight to the receiver's
    R x M places; across nodes they are received once per node and once per rank. Source:
    `calculate_elastic_buffer_size` (NVLink inside a node, hybrid across nodes), DeepEP 2.1.0.
    """
    m, peers = max_tokens, min(ranks, ranks_per_node)
    nodes = -(-ranks // ranks_per_node)
    scales = _align(-(-hidden // 32) * 4, 32) if fp8 else 0
    metadata = _align(top_k * 8 + (1 + top_k) * 4, 32)
    sent = _align(hidden * (1 if fp8 else 2), 32) + scales + metadata
    back = _align(hidden * 2, 32) + _align(top_k * 8, 32)
    if nodes == 1:
        dispatch, combine = ranks * m, min(ranks, top_k) * m
    else:
        channels = 8 * 160
        dispatch = peers * nodes * m + m + nodes * (m + channels)
        combine = min(peers, top_k) * nodes * m + min(nodes, top_k) * m + nodes * (m + channels)
    return _align(max(dispatch * sent, combine * back), 2 << 20)


def low_latency_max_tokens(*, budget_bytes: int, hidden: int, slots: int, multiple_of: int = 1) -> int:
    """The most tokens per rank whose low-latency buffer fits `budget_bytes`; 0 if none does."""
    one = low_latency_buffer_bytes(max_tokens=1, hidden=hidden, slots=slots)
    fixed = low_latency_buffer_bytes(max_tokens=0, hidden=hidden, slots=slots)
    tokens = max(0, budget_bytes - fixed) // (one - fixed)
    return tokens // multiple_of * multiple_of


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
