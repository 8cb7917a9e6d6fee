"""Times of the kernels at DeepSeek-V3's sizes, what torch offers for the same, and the work they do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels import roofline, shapes
from moe_runtime.kernels.grouped_gemm.formats import Fp8Block, Weight
from moe_runtime.kernels.registry import select
from moe_runtime.kernels.roofline import Work

MODEL = shapes.DEEPSEEK_V3
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One call to time, and other ways to do the same by name.

    `target`: the part of a measured rate it is to reach, that of `against`; `group` ties timings that are
    compared with each other.
    """

    work: Work
    call: Call
    target: float | None = None
    against: Literal["bandwidth", "dense"] = "bandwidth"
    baselines: dict[str, Call] = field(default_factory=dict)
    group: str = ""


def all_timings(device: torch.device, *, tiny: bool) -> Iterator[Timing]:
    """In the order of their memory's needs; each is dropped before the next is made."""
    slots = 2 if tiny else 9
    H, M = (256, 128) if tiny else (MODEL.hidden, MODEL.expert_intermediate)
    for rows in (1, 4, 16) if not tiny else (4,):
        for outputs, inputs in ((2 * M, H), (H, M)):
            yield grouped(device, "bf16", slots, rows, outputs, inputs, target=0.8)
            yield grouped(device, "fp8_block", slots, rows, outputs, inputs, target=0.8)
    for outputs, inputs in ((2 * M, H), (H, M)):
        rows = 8 if tiny else 4096
        timing = grouped(device, "bf16", slots, rows, outputs, inputs, target=0.8)
        yield replace(timing, against="dense")
        yield grouped(device, "fp8_block", slots, rows, outputs, inputs)
    yield latent_decode(device, *((2, 64) if tiny else (128, 4096)))
    for tokens in (8,) if tiny else (128, 8192):
        yield from moving(device, tokens, H, M)


def grouped(
    device: torch.device,
    form: str,
    slots: int,
    rows: int,
    outputs: int,
    inputs: int,
    target: float | None = None,
) -> Timing:
    """Even groups: the kernel against torch's grouped product and a product per expert."""
    x = torch.randn(slots * rows, inputs, device=device).bfloat16()
    weight: Weight = torch.randn(slots, outputs, inputs, device=device, dtype=torch.bfloat16)
    counts = torch.full((slots,), rows, dtype=torch.int32, device=device)
    starts = torch.arange(slots, dtype=torch.int32, device=device) * rows
    work = roofline.grouped_gemm(slots, rows, outputs, inputs, form)
    kernel, extra, baselines = select("grouped_gemm", device.type), {}, {}
    ends = starts + counts
    if form == "bf16":
        plain: Tensor = weight
        baselines = {
            "torch._grouped_mm": lambda: torch._grouped_mm(x, plain.transpose(1, 2), offs=ends),
            "loop": lambda: [F.linear(part, w) for part, w in zip(x.chunk(slots), plain, strict=True)],
        }
    else:
        dtype, device_blocks = torch.float8_e4m3fn, (-(-outputs // 128), -(-inputs // 128))
        weight = Fp8Block(weight.to(dtype), torch.full((slots, *device_blocks), 0.01, device=device))
        x, extra["x_scales_NB"] = select("quantize_fp8_block", device.type)(x)
        row_scales = torch.ones(slots * rows, device=device)
        column_scales = torch.ones(slots, outputs, device=device)
        values = weight.values
        # Of the same size, but scaled by row and column: torch has no blocks of 128.
        baselines["torch._scaled_grouped_mm"] = lambda: torch._scaled_grouped_mm(
            x, values.transpose(1, 2), row_scales, column_scales, offs=ends, out_dtype=torch.bfloat16
        )
    return Timing(
        work=work,
        call=lambda: kernel(x, weight, starts, counts, zero_gaps=False, rows_per_slot=rows, **extra),
        target=target,
        baselines=baselines,
        group=f"{slots} x {rows}, {inputs} -> {outputs}",
    )


def latent_decode(device: torch.device, sequences: int, context: int) -> Timing:
    """Absorbed latent attention against torch's on gathered keys, which are the values too."""
    S, R, A = 64, MODEL.latent_rank, 16 if sequences < 8 else MODEL.heads
    blocks = context // S
    cache = torch.randn(sequences * blocks, S, R + MODEL.rope_dim, device=device).bfloat16()
    table = torch.randperm(sequences * blocks, device=device).view(sequences, blocks)
    lengths = torch.full((sequences,), context, device=device)
    plan = select("plan_decode", device.type)(table, lengths, max_context=context, block_tokens=S)
    q = torch.randn(sequences, A, MODEL.nope_dim + MODEL.rope_dim, device=device).bfloat16()
    kv_b = torch.randn(A * (MODEL.nope_dim + MODEL.value_dim), R, device=device).bfloat16() / R**0.5
    out = torch.empty(sequences, A * MODEL.value_dim, device=device, dtype=q.dtype)
    kernel = select("mla_decode", device.type)
    absorbed = torch.randn(sequences, 1, A, R + MODEL.rope_dim, device=device).bfloat16()
    keys = cache[table].view(sequences, 1, context, -1)
    values = keys[..., :R].contiguous()
    return Timing(
        work=roofline.mla_decode(MODEL, sequences, context),
        call=lambda: kernel(q, cache, plan, kv_b, 0.07, out_DX=out),
        target=0.75,
        baselines={"sdpa": lambda: F.scaled_dot_product_attention(absorbed, keys, values, scale=0.07)},
    )


def moving(device: torch.device, tokens: int, H: int, M: int) -> Iterator[Timing]:
    """What is bound by memory: against the bandwidth of a copy."""
    kind, model = device.type, MODEL
    x = torch.randn(tokens, H, device=device).bfloat16()
    logits = torch.randn(tokens, model.experts, device=device)
    how = {
        "top_k": model.top_k,
        "scoring": model.scoring,
        "num_groups": model.groups,
        "kept_groups": model.kept_groups,
        "masked_group_score": float("-inf"),
        "normalize": True,
        "epsilon": 1e-20,
        "scale": 2.5,
    }
    route, permute, unpermute = (select(op, kind) for op in ("route", "permute", "unpermute"))
    ids, weights = route(logits, torch.zeros(model.experts, device=device), **how)
    pairs = tokens * model.top_k
    moved, places, _, _ = permute(x, ids, model.experts, capacity=pairs)
    both = torch.randn(pairs, 2 * M, device=device).bfloat16()
    gate, up = both.chunk(2, -1)
    residual, norm = x.clone(), torch.ones(H, device=device).bfloat16()
    quantize, fused, activate = (
        select(op, kind) for op in ("quantize_fp8_block", "silu_mul_quantize", "silu_mul")
    )
    rms_norm = select("rms_norm", kind)
    yield Timing(work=roofline.route(model, tokens), call=lambda: route(logits, None, **how))
    yield Timing(
        work=roofline.permute(model, tokens),
        call=lambda: permute(x, ids, model.experts, capacity=pairs),
    )
    yield Timing(work=roofline.unpermute(model, tokens), call=lambda: unpermute(moved, places, weights))
    yield Timing(work=roofline.quantize_fp8_block(tokens, H), call=lambda: quantize(x))
    yield Timing(work=roofline.silu_mul(pairs, M), call=lambda: activate(gate, up))
    yield Timing(work=roofline.silu_mul(pairs, M, quantize=True), call=lambda: fused(gate, up))
    yield Timing(
        work=roofline.rms_norm(tokens, H, residual=True),
        call=lambda: rms_norm(x, norm, 1e-6, residual=residual),
        baselines={"torch": lambda: F.rms_norm(residual.add_(x), (H,), norm, 1e-6)},
    )
