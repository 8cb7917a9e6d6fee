"""Grouped-query attention over a paged cache, with optional RMS norm of queries and keys.

A cache entry is all key heads, then all value heads. T rows, D decode rows, H hidden,
A query heads, h key/value heads, d head dimension. Numerics follow transformers' modeling_qwen3_moe.
"""

import torch
from torch import Tensor, nn

from moe_runtime.models.attention.paged import decode_plan, prefill_plan
from moe_runtime.models.context import StepContext
from moe_runtime.models.ops import Ops
from moe_runtime.models.parameters import Weight
from moe_runtime.models.rope import Rope
from moe_runtime.spec.model import GqaSpec, ModelSpec


class GqaAttention(nn.Module):
    """One layer's attention. `project` and `attend` are the two halves around the first yield."""

    def __init__(
        self, spec: ModelSpec, layer: int, *, rope: Rope, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        a = spec.attention
        assert isinstance(a, GqaSpec)
        self._a, self._layer, self._rope, self._ops = a, layer, rope, ops
        self._scale, self._eps = spec.softmax_scale, spec.norm_eps
        rows = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        self.qkv_proj = Weight(rows, spec.hidden, dtype=dtype, device=device, bias=a.qkv_bias)
        if a.qk_norm:
            self.q_norm = Weight(a.head_dim, dtype=dtype, device=device)
            self.k_norm = Weight(a.head_dim, dtype=dtype, device=device)
        self.o_proj = Weight(spec.hidden, a.num_heads * a.head_dim, dtype=dtype, device=device)

    def prepare(self) -> None:
        """Pack the projections."""
        self.qkv_proj.pack(self._ops.pack)
        self.o_proj.pack(self._ops.pack)

    def project(self, h_TH: Tensor, step: StepContext) -> Tensor:
        """Queries [T, A, d], normalised and rotated; the rows' cache entries are written."""
        a, ops, dim = self._a, self._ops, self._rope.dim
        qkv: Tensor = ops.linear(h_TH, self.qkv_proj.weight, self.qkv_proj.bias)
        heads_TNd = qkv.view(-1, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        q_TAd, k_Thd = heads_TNd[:, : a.num_heads], heads_TNd[:, a.num_heads : a.num_heads + a.num_kv_heads]
        if a.qk_norm:
            ops.rms_norm(q_TAd, self.q_norm.weight, self._eps, out=q_TAd)
            ops.rms_norm(k_Thd, self.k_norm.weight, self._eps, out=k_Thd)
        # Queries and keys are neighbours: one rotation for both.
        q_and_k = heads_TNd[:, : a.num_heads + a.num_kv_heads, :dim]
        ops.rope(q_and_k, self._rope.rows(step), interleaved=self._rope.interleaved)
        entries_TE = qkv[:, a.num_heads * a.head_dim :]
        ops.kv_write(step.kv_cache[self._layer], step.kv_slots_T, entries_TE)
        return q_TAd

    def attend(self, q_TAd: Tensor, step: StepContext, *, add_to: Tensor) -> Tensor:
        """`add_to` [T, H] plus the attention's output, in place."""
        ops, cache, D = self._ops, step.kv_cache[self._layer], step.num_decode
        out_TX = q_TAd.new_empty(q_TAd.shape[0], self._a.num_heads * self._a.head_dim)
        if D:
            plan = decode_plan(step, ops, self._layer)
            ops.gqa_decode(q_TAd[:D], cache, plan, self._scale, out_DX=out_TX[:D])
        if step.segments:
            plan = prefill_plan(step, ops, self._layer)
            ops.gqa_prefill(q_TAd, cache, plan, self._scale, out_TX=out_TX)
        result: Tensor = ops.linear(out_TX, self.o_proj.weight, add_to=add_to)
        return result
