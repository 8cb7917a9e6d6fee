"""The least time a kernel can take on a chip: bytes and operations from shapes, against the chip's rates.

Owns the formulas and the list of shapes that are of interest. Every byte counts once, however often a cache
could not hold it; a multiplication and an addition are two operations. No device, no torch.
N rows, T tokens, s slots, K top-k, O outputs, I inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_runtime.kernels import shapes
from moe_runtime.kernels.mla_prefill.forms import LatentSizes, expanded_operations
from moe_runtime.kernels.shapes import ModelShape

Rate = Literal["bf16", "fp8"]
# Bytes of a weight, scales included: fp32 per 128 x 128, e8m0 per 32, bf16 per 32.
WEIGHT_BYTES = {"bf16": 2.0, "fp8_block": 1 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Peak rates per second: bytes of device memory, dense operations. Source: NVIDIA's data sheets (SXM)."""

    name: str
    bandwidth: float
    bf16: float
    fp8: float


H100 = Chip(name="H100", bandwidth=3.35e12, bf16=989.4e12, fp8=1978.9e12)
H200 = Chip(name="H200", bandwidth=4.8e12, bf16=989.4e12, fp8=1978.9e12)
B200 = Chip(name="B200", bandwidth=8.0e12, bf16=2250e12, fp8=4500e12)
CHIPS = (H100, H200, B200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call has to move and compute; `rate`: which units do the computing."""

    operation: str
    shape: str
    bytes: float
    operations: float = 0.0
    rate: Rate = "bf16"

    def floor(self, chip: Chip) -> float:
        """Seconds."""
        return max(self.bytes / chip.bandwidth, self._computing(chip))

    def bound(self, chip: Chip) -> str:
        """What the floor is set by."""
        return "compute" if self._computing(chip) > self.bytes / chip.bandwidth else "memory"

    def _computing(self, chip: Chip) -> float:
        return self.operations / (chip.fp8 if self.rate == "fp8" else chip.bf16)


def grouped_gemm(slots: int, rows_per_slot: float, outputs: int, inputs: int, weights: str) -> Work:
    """All slots' weights once, rows in and out in bf16 (for fp8 weights in fp8, with scales)."""
    N = slots * rows_per_slot
    row_bytes = (1 + 4 / 128) if weights == "fp8_block" else 2
    return Work(
        operation="grouped_gemm",
        shape=f"{slots} x {rows_per_slot:g} rows, {inputs} -> {outputs}, {weights}",
        bytes=slots * outputs * inputs * WEIGHT_BYTES[weights] + N * (inputs * row_bytes + outputs * 2),
        operations=2 * N * outputs * inputs,
        rate="fp8" if weights == "fp8_block" else "bf16",
    )


def mla_decode(model: ModelShape, sequences: int, context: int, *, packed: bool = False) -> Work:
    """The latent cache once (packed: e4m3 latents with four fp32 scales); both halves of kv_b once."""
    R, D = model.latent_rank, model.rope_dim
    entry = R + 16 + 2 * D if packed else 2 * (R + D)
    absorbed = model.heads * R * (model.nope_dim + model.value_dim)
    queries = sequences * model.heads * (model.nope_dim + D + model.value_dim)
    return Work(
        operation="mla_decode",
        shape=f"{sequences} x {context} tokens, {model.heads} heads{', fp8' * packed}",
        bytes=sequences * context * entry + 2 * (absorbed + queries),
        operations=2 * sequences * (context * model.heads * (2 * R + D) + absorbed),
    )


def mla_prefill(model: ModelShape, tokens: int, context: int) -> Work:
    """One sequence: `tokens` new ones against themselves (half of them on average) and `context` before."""
    sizes = LatentSizes(
        heads=model.heads,
        nope=model.nope_dim,
        rope=model.rope_dim,
        value=model.value_dim,
        rank=model.latent_rank,
    )
    per_head = model.nope_dim + model.rope_dim + model.value_dim
    entries = (tokens + context) * (model.latent_rank + model.rope_dim)
    return Work(
        operation="mla_prefill",
        shape=f"{tokens} after {context} tokens, {model.heads} heads",
        bytes=2 * (entries + tokens * model.heads * per_head),
        operations=expanded_operations(sizes, tokens, context),
    )


def gqa_decode(model: ModelShape, sequences: int, context: int) -> Work:
    """Keys and values once."""
    return Work(
        operation="gqa_decode",
        shape=f"{sequences} x {context} tokens, {model.heads}/{model.kv_heads} heads of {model.head_dim}",
        bytes=2 * sequences * model.head_dim * (2 * context * model.kv_heads + 2 * model.heads),
        operations=4 * sequences * context * model.heads * model.head_dim,
    )


def gqa_prefill(model: ModelShape, tokens: int, context: int) -> Work:
    """One sequence, as for `mla_prefill`."""
    seen = tokens * (context + tokens / 2)
    entries = 2 * (tokens + context) * model.kv_heads
    return Work(
        operation="gqa_prefill",
        shape=f"{tokens} after {context} tokens, {model.heads}/{model.kv_heads} heads of {model.head_dim}",
        bytes=2 * model.head_dim * (entries + 2 * tokens * model.heads),
        operations=4 * model.heads * model.head_dim * seen,
    )


def route(model: ModelShape, tokens: int) -> Work:
    """fp32 logits in, int64 ids and fp32 weights out."""
    return Work(
        operation="route",
        shape=f"{tokens} tokens, {model.top_k} of {model.experts}",
        bytes=tokens * (4 * model.experts + 12 * model.top_k),
    )


def permute(model: ModelShape, tokens: int) -> Work:
    """Every row of bf16 read once, written top-k times; the slot ids twice (counted, then placed)."""
    return Work(
        operation="permute",
        shape=f"{tokens} x {model.hidden}, top-{model.top_k}",
        bytes=tokens * (2 * model.hidden * (1 + model.top_k) + model.top_k * 24),
    )


def unpermute(model: ModelShape, tokens: int) -> Work:
    """Every expert's row of bf16 read once, every token's written once."""
    return Work(
        operation="unpermute",
        shape=f"{tokens} x {model.hidden}, top-{model.top_k}",
        bytes=tokens * (2 * model.hidden * (1 + model.top_k) + model.top_k * 12),
    )


def quantize_fp8_block(rows: int, columns: int) -> Work:
    """bf16 in, fp8 and a scale per 128 out."""
    return Work(
        operation="quantize_fp8_block",
        shape=f"{rows} x {columns}",
        bytes=rows * columns * (2 + 1 + 4 / 128),
    )


def silu_mul(rows: int, columns: int, *, quantize: bool = False) -> Work:
    """Gate and up in bf16 in; bf16, or fp8 and scales, out."""
    return Work(
        operation="silu_mul_quantize" if quantize else "silu_mul",
        shape=f"{rows} x {columns}",
        bytes=rows * columns * (4 + ((1 + 4 / 128) if quantize else 2)),
    )


def rms_norm(rows: int, columns: int, *, residual: bool = False) -> Work:
    """bf16; with a residual that is read and written too."""
    return Work(
        operation="rms_norm",
        shape=f"{rows} x {columns}{' + residual' * residual}",
        bytes=rows * columns * (8 if residual else 4),
    )


def rope(rows: int, heads: int, dim: int) -> Work:
    """bf16, in place; the table's rows in fp32."""
    return Work(
        operation="rope",
        shape=f"{rows} x {heads} heads of {dim}",
        bytes=rows * dim * (4 * heads + 4),
    )


def mla_assemble(model: ModelShape, tokens: int) -> Work:
    """The rotated part of the queries in place, entries from the projection to the cache, table rows."""
    entry = model.latent_rank + model.rope_dim
    return Work(
        operation="mla_assemble",
        shape=f"{tokens} tokens, {model.heads} heads",
        bytes=tokens * (4 * model.heads * model.rope_dim + 4 * entry + 4 * model.rope_dim + 8),
    )


def choose_slots(model: ModelShape, tokens: int) -> Work:
    """int64 ids in, slots out, ranks between; the tables are small."""
    return Work(
        operation="choose_slots",
        shape=f"{tokens} tokens, top-{model.top_k}",
        bytes=tokens * model.top_k * (8 + 4 + 4 + 8 + 8),
    )


def all_work() -> Iterator[Work]:
    """The shapes that matter: decode steps of 128 tokens per rank and prefill of 8192, for every model."""
    for model in shapes.MODELS:
        H, M = model.hidden, model.expert_intermediate
        slots = max(1, model.experts // 32)
        for rows in (1, 4, 16, 8192 * model.top_k // slots):
            yield grouped_gemm(slots, rows, 2 * M, H, model.expert_weights)
            yield grouped_gemm(slots, rows, H, M, model.expert_weights)
        if model.latent_rank:
            yield mla_assemble(model, 128)
            yield mla_assemble(model, 8192)
            yield mla_decode(model, 128, 4096)
            yield mla_decode(model, 128, 4096, packed=True)
            yield mla_prefill(model, 4096, 0)
            yield mla_prefill(model, 4096, 12288)
        else:
            yield rope(128, model.heads + model.kv_heads, model.head_dim)
            yield rope(8192, model.heads + model.kv_heads, model.head_dim)
            yield gqa_decode(model, 128, 4096)
            yield gqa_prefill(model, 4096, 0)
            yield gqa_prefill(model, 4096, 12288)
        for tokens in (128, 8192):
            yield route(model, tokens)
            yield choose_slots(model, tokens)
            yield permute(model, tokens)
            yield unpermute(model, tokens)
            yield quantize_fp8_block(tokens, H)
            yield silu_mul(tokens * model.top_k, M)
            yield silu_mul(tokens * model.top_k, M, quantize=True)
            yield rms_norm(tokens, H, residual=True)


def lines() -> Iterator[str]:
    """The table: work, then per chip the floor in microseconds and what sets it."""
    chips = " | ".join(f"{chip.name} us" for chip in CHIPS)
    yield f"operation | shape | MB | GFLOP | {chips}"
    for work in all_work():
        floors = " | ".join(f"{work.floor(chip) * 1e6:.1f} {work.bound(chip)}" for chip in CHIPS)
        amounts = f"{work.bytes / 1e6:.2f} | {work.operations / 1e9:.1f}"
        yield f"{work.operation} | {work.shape} | {amounts} | {floors}"
