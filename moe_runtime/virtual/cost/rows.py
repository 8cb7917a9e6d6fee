"""The kernels of a layer as functions of rows: everything but transfers and imbalance.

Owns which products and streaming kernels a layer is made of and over how many bytes, for MLA and GQA, for
tensor-parallel slices. Rows may be numbers or arrays. Sizes come from ModelSpec. H hidden, I intermediate.
"""

from dataclasses import dataclass

from moe_runtime.spec.model import GqaSpec, MlaSpec, ModelSpec
from moe_runtime.virtual.cost.constants import KernelConstants
from moe_runtime.virtual.cost.deployment import Precision
from moe_runtime.virtual.cost.work import Number, Rates, Work, value_bytes

TWO = 2  # bytes of an activation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKernels:
    """Work per layer and micro-batch on one rank.

    slice_of   ranks that share the heads (tensor parallelism of attention)
    expert_slice_of  ranks that share each expert and MLP (whole-model tensor parallelism)
    """

    model: ModelSpec
    precision: Precision
    rates: Rates
    slice_of: int = 1
    expert_slice_of: int = 1

    @property
    def heads(self) -> int:
        return max(1, self.model.attention.num_heads // self.slice_of)

    @property
    def kernels(self) -> KernelConstants:
        return self.rates.kernels

    # Projections before the attention core.

    def project(self, rows: Number) -> Work:
        """Products of all rows: q_a with kv_a, then q_b (MLA), or q, k and v (GQA)."""
        a, h, dtype, gemm = self.model.attention, self.model.hidden, self.precision.dense, self.rates.gemm
        if isinstance(a, GqaSpec):
            kv_heads = max(1, a.num_kv_heads // self.slice_of)
            return gemm(rows, (self.heads + 2 * kv_heads) * a.head_dim, h, dtype)
        queries = self.heads * a.qk_head_dim
        if not a.q_lora_rank:
            return gemm(rows, queries + a.kv_entry, h, dtype)
        return gemm(rows, a.q_lora_rank + a.kv_entry, h, dtype).plus(
            gemm(rows, queries, a.q_lora_rank, dtype)
        )

    def absorb(self, rows: Number) -> Work:
        """Decode rows of MLA: queries into the latent space; outputs back out. Per-head products in bf16."""
        a = self.model.attention
        if isinstance(a, GqaSpec):
            return Work()
        dtype, gemm = self.precision.attention, self.rates.gemm
        into = gemm(rows, a.kv_lora_rank, a.qk_nope_head_dim, dtype, count=self.heads)
        return into.plus(gemm(rows, a.v_head_dim, a.kv_lora_rank, dtype, count=self.heads))

    def expand(self, rows: Number) -> Work:
        """Prefill of MLA: keys and values of new and cached rows out of the latents."""
        a = self.model.attention
        if isinstance(a, GqaSpec):
            return Work()
        width = self.heads * (a.qk_nope_head_dim + a.v_head_dim)
        return self.rates.gemm(rows, width, a.kv_lora_rank, self.precision.dense)

    def output(self, rows: Number) -> Work:
        a = self.model.attention
        width = self.heads * (a.v_head_dim if isinstance(a, MlaSpec) else a.head_dim)
        return self.rates.gemm(rows, self.model.hidden, width, self.precision.dense)

    # Attention cores.

    def decode_core(self, context: Number, queries: int) -> Work:
        """Sequences whose contexts sum to `context` tokens, `queries` rows each; linear in `context`.

        MLA absorbed: every head scores the latent and the rope key and sums the latents. GQA: the same with
        its own keys and values; a group of heads shares them.
        """
        a, k = self.model.attention, self.kernels
        size = value_bytes(self.precision.cache)
        if isinstance(a, MlaSpec):
            flops, entry = 2.0 * self.heads * (a.kv_entry + a.kv_lora_rank), float(a.kv_entry)
        else:
            flops = 4.0 * self.heads * a.head_dim
            entry = 2.0 * max(1, a.num_kv_heads // self.slice_of) * a.head_dim
        # The shares are those of whole kernels inside a step: what both limits cost together is in them.
        compute = flops * queries / (self.rates.peak(self.precision.attention) * k.decode_compute_share)
        memory = entry * size / (self.rates.bandwidth * k.decode_memory_share)
        one = Work(compute, 0.0, 0.0) if compute > memory else Work(0.0, memory, 0.0)
        return one.times(context)

    def prefill_core(self, pairs: Number, rows: Number) -> Work:
        """`pairs` (query, key) pairs of `rows` queries; half a tile a row on the diagonal is in vain."""
        a, k = self.model.attention, self.kernels
        per_pair = a.qk_head_dim + a.v_head_dim if isinstance(a, MlaSpec) else 2 * a.head_dim
        rate = self.rates.peak(self.precision.attention) * k.prefill_compute_share
        flops = 2.0 * self.heads * per_pair * (pairs + rows * k.prefill_tile / 2)
        return Work(flops / rate, 0.0, 0.0)

    # After attention.

    def router(self, rows: Number) -> Work:
        """Scores of all experts, then the choice; two small kernels."""
        moe = self.model.moe
        scores = self.rates.gemm(rows, moe.num_experts, self.model.hidden, "bfloat16")
        return scores.plus(self.rates.stream(rows * moe.num_experts * 8.0, 2))

    def mlp(self, rows: Number, intermediate: int) -> Work:
        """A gated MLP that every rank (or its group) computes: shared experts, dense layers."""
        i = max(1, intermediate // self.expert_slice_of)
        h, dtype, gemm = self.model.hidden, self.precision.dense, self.rates.gemm
        return gemm(rows, 2 * i, h, dtype).plus(gemm(rows, h, i, dtype))

    def experts(self, rows: Number, slots: float, *, masked: bool) -> Work:
        """Grouped products of `rows` (token, expert) rows over a rank's slots."""
        i = max(1, self.model.moe.intermediate // self.expert_slice_of)
        h, dtype = self.model.hidden, self.precision.experts
        tile = self.kernels.dense_tile if masked else self.kernels.grouped_tile
        up = self.rates.grouped_gemm(rows, slots, 2 * i, h, dtype, tile)
        return up.plus(self.rates.grouped_gemm(rows, slots, h, i, dtype, tile))

    # Streaming kernels: bytes read and written, and how many kernels.

    def stream_first(self, rows: Number) -> Work:
        """Norm with residual (8 H), quantised input (3 H), latents or heads normed and rotated, cached."""
        a, h = self.model.attention, self.model.hidden
        if isinstance(a, MlaSpec):
            mine = 7.0 * a.q_lora_rank + 6.0 * a.kv_entry + 4.0 * self.heads * a.qk_rope_head_dim
            return self.rates.stream(rows * (11.0 * h + mine), 7)
        width = (self.heads + 2 * max(1, a.num_kv_heads // self.slice_of)) * a.head_dim
        return self.rates.stream(rows * (11.0 * h + 4.0 * width), 5)

    def assemble(self, rows: Number) -> Work:
        """Prefill of MLA: expanded keys and values read and written with their rope parts."""
        a = self.model.attention
        if isinstance(a, GqaSpec):
            return Work()
        width = self.heads * (a.qk_nope_head_dim + a.qk_head_dim + 2 * a.v_head_dim)
        return self.rates.stream(rows * float(width * TWO), 1)

    def stream_second(self, rows: Number) -> Work:
        """Quantised attention output (3 bytes a value), norm with residual (8 H)."""
        a = self.model.attention
        width = self.heads * (a.v_head_dim if isinstance(a, MlaSpec) else a.head_dim)
        return self.rates.stream(rows * (3.0 * width + 8.0 * self.model.hidden), 2)

    def stream_mlp(self, rows: Number, intermediate: int) -> Work:
        """Quantised input (3 H), gated activation with quantisation (5 I)."""
        i = max(1, intermediate // self.expert_slice_of)
        return self.rates.stream(rows * (3.0 * self.model.hidden + 5.0 * i), 2)

    def stream_experts(self, rows: Number, *, masked: bool) -> Work:
        """Activation with quantisation (5 I); contiguous rows are also permuted (2 H) and gathered (4 H)."""
        i = max(1, self.model.moe.intermediate // self.expert_slice_of)
        per_row = 5.0 * i + (0.0 if masked else 6.0 * self.model.hidden)
        return self.rates.stream(rows * per_row, 1 if masked else 3)

    def stream_finish(self, rows: Number) -> Work:
        """Routed, shared and residual rows summed (8 H)."""
        return self.rates.stream(rows * 8.0 * self.model.hidden, 1)

    def copies(self, sent: Number, received: Number, rounds: int) -> tuple[Work, Work]:
        """Send and receive kernels of low-latency dispatches and combines that run in the background.

        `sent` rows leave and `received` arrive, in `rounds`; each is read and written once on either side.
        """
        h = self.model.hidden
        out, back = h * value_bytes(self.precision.dispatch), h * value_bytes(self.precision.combine)
        both = 2.0 * (sent + received)
        start = Work(0.0, 0.0, 2 * rounds * self.kernels.copy_start)
        return self.rates.stream(both * out, 0).plus(start), self.rates.stream(both * back, 0).plus(start)

    def head(self, rows: Number) -> Work:
        """Final norm and logits of the rows that are sampled."""
        vocabulary = max(1, self.model.vocab_size // self.expert_slice_of)
        logits = self.rates.gemm(rows, vocabulary, self.model.hidden, self.precision.head)
        return logits.plus(self.rates.stream(rows * vocabulary * 8.0, 4))
