"""Roofline: seconds below which no step can fall, whatever its kernels: arithmetic and memory of a mean rank.

Owns one definition: the larger of (a) operations of all products at the datasheet's dense peak of their
dtype, (b) bytes at the datasheet's bandwidth, where weights are read once a step (an expert's if it gets a
row), every context's cache once, rows of activations not at all. Transfers, starts, waiting: none of it.
"""

import math
from typing import NamedTuple

from moe_runtime.spec.hardware import Hardware
from moe_runtime.spec.model import MlaSpec, ModelSpec
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.shapes import StepShape
from moe_runtime.virtual.cost.work import value_bytes


class _Product(NamedTuple):
    """Seconds of arithmetic per row at the peak, and of reading the weights once."""

    row: float
    weights: float

    def plus(self, *others: "_Product") -> "_Product":
        return _Product(sum(p.row for p in (self, *others)), sum(p.weights for p in (self, *others)))

    def times(self, count: float) -> "_Product":
        return _Product(self.row * count, self.weights * count)


class Roofline:
    """Ideal step times of one instance; everything below is of all layers together."""

    def __init__(self, model: ModelSpec, setting: Setting, hardware: Hardware) -> None:
        self._model, self._hardware = model, hardware
        whole = setting.experts == "tensor_parallel"
        expert_slice, self._spread_over = (setting.ranks, 1) if whole else (1, setting.ranks)
        a, moe, h, p = model.attention, model.moe, model.hidden, setting.precision
        heads = max(1, a.num_heads // setting.tensor_parallel)
        layers, moe_layers = model.num_layers, model.num_moe_layers
        product = self._product
        if isinstance(a, MlaSpec):
            queries = heads * a.qk_head_dim
            lora = a.q_lora_rank
            into = product((lora or queries) + a.kv_entry, h, p.dense)
            if lora:
                into = into.plus(product(queries, lora, p.dense))
            output = product(h, heads * a.v_head_dim, p.dense)
            latent = heads * (a.qk_nope_head_dim + a.v_head_dim)
            self._expand = product(latent, a.kv_lora_rank, p.dense).times(layers)
            self._absorb = product(latent, a.kv_lora_rank, p.attention).times(layers)
            context, pair, entry = (
                heads * (a.kv_entry + a.kv_lora_rank),
                heads * (a.qk_head_dim + a.v_head_dim),
                a.kv_entry,
            )
        else:
            kv_heads = max(1, a.num_kv_heads // setting.tensor_parallel)
            into = product((heads + 2 * kv_heads) * a.head_dim, h, p.dense)
            output = product(h, heads * a.head_dim, p.dense)
            self._expand = self._absorb = _Product(0.0, 0.0)
            context = pair = 2 * heads * a.head_dim
            entry = 2 * kv_heads * a.head_dim
        peak = hardware.flops[p.attention]
        self._context, self._pair = 2.0 * context * layers / peak, 2.0 * pair * layers / peak
        self._cached = entry * value_bytes(p.cache) * layers / hardware.memory_bandwidth
        mlp = product(3 * h, 1, p.dense).times(
            (model.dense_intermediate * (layers - moe_layers) + moe.shared_intermediate * moe_layers)
            / expert_slice
        )
        router = product(moe.num_experts, h, "bfloat16").times(moe_layers)
        self._rows = into.plus(output).times(layers).plus(mlp, router)
        self._expert = product(3 * h, moe.intermediate, p.experts).times(moe_layers / expert_slice)
        self._slots = moe.slot_experts if whole else setting.slots_per_rank
        self._head = product(model.vocab_size, h, p.head).times(1 / expert_slice)

    def _product(self, n: int, k: int, dtype: str) -> _Product:
        size = n * k
        return _Product(
            2.0 * size / self._hardware.flops[dtype],
            size * value_bytes(dtype) / self._hardware.memory_bandwidth,
        )

    def seconds(self, shape: StepShape) -> float:
        """Of one step, a mean rank."""
        groups = shape.num_ranks
        sequences = float(shape.decode_sequences_R.sum()) / groups
        context = float(shape.decode_context_R.sum()) / groups
        decode, prefill, prefix, pairs, prompts = sequences * shape.queries, 0.0, 0.0, 0.0, 0.0
        if shape.prefill_tokens_R.any():
            prefill = float(shape.prefill_tokens_R.sum()) / groups
            prefix = float(shape.prefill_prefix_R.sum()) / groups
            pairs = float(shape.prefill_pairs_R.sum()) / groups
            prompts = float((shape.prefill_tokens_R > 0).sum()) / groups
        rows = decode + prefill
        expert_rows = rows * groups / self._spread_over * self._model.moe.slots_per_token
        arithmetic = (
            rows * self._rows.row
            + expert_rows * self._expert.row
            + decode * self._absorb.row
            + (prefill + prefix) * self._expand.row
            + context * shape.queries * self._context
            + pairs * self._pair
            + (decode + prompts) * self._head.row
        )
        active = self._slots * -math.expm1(-expert_rows / self._slots)
        memory = (
            self._rows.weights
            + active * self._expert.weights
            + (self._expand.weights if prefill else self._absorb.weights if decode else 0.0)
            + (self._head.weights if rows else 0.0)
            + (context + prefix) * self._cached
        )
        return max(arithmetic, memory)
