"""Multi-head latent attention over a paged latent cache.

A cache entry is the normalised latent, then the rotated key that all heads share. Decode rows use the
absorbed form, prefill rows the one their kernel finds cheaper. T rows, D decode rows, H hidden, A heads.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; numerics follow transformers' modeling_deepseek_v3.
"""

import torch
from torch import Tensor, nn

from moe_runtime.models.attention.paged import decode_plan, prefill_plan
from moe_runtime.models.context import StepContext
from moe_runtime.models.ops import Ops
from moe_runtime.models.parameters import Weight
from moe_runtime.models.rope import Rope
from moe_runtime.spec.model import MlaSpec, ModelSpec


class MlaAttention(nn.Module):
    """One layer's attention. `project` and `attend` are the two halves around the first yield."""

    def __init__(
        self, spec: ModelSpec, layer: int, *, rope: Rope, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        a = spec.attention
        assert isinstance(a, MlaSpec)
        self._a, self._layer, self._rope, self._ops = a, layer, rope, ops
        self._scale = spec.softmax_scale
        q_rows, kv_a_rows = a.num_heads * a.qk_head_dim, a.kv_entry

        def weight(*shape: int) -> Weight:
            return Weight(*shape, dtype=dtype, device=device)

        if a.q_lora_rank:
            self.qkv_a_proj = weight(a.q_lora_rank + kv_a_rows, spec.hidden)
            self.q_a_norm = weight(a.q_lora_rank)
            self.q_b_proj = weight(q_rows, a.q_lora_rank)
        else:
            self.q_proj = weight(q_rows, spec.hidden)
            self.kv_a_proj = weight(kv_a_rows, spec.hidden)
        self.kv_a_norm = weight(a.kv_lora_rank)
        self.kv_b_proj = weight(a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
        self.o_proj = weight(spec.hidden, a.num_heads * a.v_head_dim)

    def prepare(self) -> None:
        """Pack the projections; `kv_b_proj` stays plain, as its two halves are used per head."""
        first = (self.qkv_a_proj, self.q_b_proj) if self._a.q_lora_rank else (self.q_proj, self.kv_a_proj)
        for projection in (*first, self.o_proj):
            projection.pack(self._ops.pack)

    def project(self, h_TH: Tensor, step: StepContext) -> Tensor:
        """Queries [T, A, nope + rope], rotated; the rows' cache entries are written."""
        a, ops = self._a, self._ops
        if a.q_lora_rank:
            both = ops.linear(h_TH, self.qkv_a_proj.weight)
            q_a, entries_TE = both[:, : a.q_lora_rank], both[:, a.q_lora_rank :]
            q = ops.linear(ops.rms_norm(q_a, self.q_a_norm.weight, a.latent_norm_eps), self.q_b_proj.weight)
        else:
            q = ops.linear(h_TH, self.q_proj.weight)
            entries_TE = ops.linear(h_TH, self.kv_a_proj.weight)
        q_TAQ: Tensor = q.view(-1, a.num_heads, a.qk_head_dim)
        latent_TR = entries_TE[:, : a.kv_lora_rank]
        ops.rms_norm(latent_TR, self.kv_a_norm.weight, a.latent_norm_eps, out=latent_TR)
        cos_sin_TD = self._rope.rows(step)
        ops.rope(q_TAQ[..., a.qk_nope_head_dim :], cos_sin_TD, interleaved=self._rope.interleaved)
        key_T1D = entries_TE[:, a.kv_lora_rank :].unsqueeze(1)
        ops.rope(key_T1D, cos_sin_TD, interleaved=self._rope.interleaved)
        ops.kv_write(step.kv_cache[self._layer], step.kv_slots_T, entries_TE)
        return q_TAQ

    def attend(self, q_TAQ: Tensor, step: StepContext, *, add_to: Tensor) -> Tensor:
        """`add_to` [T, H] plus the attention's output, in place."""
        a, ops, cache = self._a, self._ops, step.kv_cache[self._layer]
        D = step.num_decode
        out_TX = q_TAQ.new_empty(q_TAQ.shape[0], a.num_heads * a.v_head_dim)
        kv_b = self.kv_b_proj.weight
        if D:
            plan = decode_plan(step, ops, self._layer)
            ops.mla_decode(q_TAQ[:D], cache, plan, kv_b, self._scale, out_DX=out_TX[:D])
        if step.segments:
            plan = prefill_plan(step, ops, self._layer)
            ops.mla_prefill(q_TAQ, cache, plan, kv_b, self._scale, out_TX=out_TX)
        result: Tensor = ops.linear(out_TX, self.o_proj.weight, add_to=add_to)
        return result
