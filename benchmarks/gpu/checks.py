"""Correctness of the kernels on the device at hand, against double precision, with poisoned outputs.

T tokens, E experts, K top-k, H hidden, s slots, N rows, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.measure import poisoned, relative_error
from moe_runtime.kernels.grouped_gemm.formats import Weight, decode, encode_fp8, encode_int4, encode_mxfp4
from moe_runtime.kernels.registry import select
from moe_runtime.kernels.rope.reference import rope_table

BF16, FP32 = 4e-3, 1e-5
ENCODERS: dict[str, Callable[[Tensor], Weight]] = {
    "bf16": lambda w: w,
    "fp8_block": encode_fp8,
    "mxfp4": encode_mxfp4,
    "int4": encode_int4,
}


class Check(NamedTuple):
    """A kernel's error and what it may be."""

    operation: str
    shape: str
    error: float
    tolerance: float


def all_checks(device: torch.device, *, tiny: bool) -> Iterator[Check]:
    """Every operation of the registry's column for the device."""
    T, H = (9, 256) if tiny else (777, 7168)
    yield from routing(device, T)
    yield from rows(device, T, H)
    yield from elementwise(device, T, H)
    for form in ENCODERS:
        yield grouped_gemm(device, form, H=256 if tiny else 2048)
    yield from attention(device, context=40 if tiny else 3001)


def routing(device: torch.device, T: int) -> Iterator[Check]:
    """DeepSeek-V3's router: the fp64 choice where margins allow, and its weights."""
    logits, bias = normal(device, T, 256) * 2, normal(device, 256) * 0.1
    with poisoned():
        ids, weights = select("route", device.type)(
            logits,
            bias,
            top_k=8,
            scoring="sigmoid",
            num_groups=8,
            kept_groups=4,
            masked_group_score=float("-inf"),
            normalize=True,
            epsilon=1e-20,
            scale=2.5,
        )
    scores = logits.double().sigmoid()
    choice = (scores + bias.double()).view(T, 8, 32)
    best = choice.topk(2, -1).values.sum(-1).topk(4, -1).indices
    kept = torch.zeros(T, 8, dtype=torch.bool, device=device).scatter_(1, best, True)
    choice = choice.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(T, 256)
    want = choice.topk(9, -1)
    clear = ((want.values[:, :-1] - want.values[:, 1:]) > 1e-5).all(1)
    wrong = (ids[clear] != want.indices[clear, :8]).sum()
    yield Check("route", f"{T} tokens, ids", float(wrong), 0.0)
    chosen = scores.gather(1, ids)
    yield Check(
        "route",
        f"{T} tokens, weights",
        relative_error(weights, 2.5 * chosen / chosen.sum(1, keepdim=True)),
        FP32,
    )


def rows(device: torch.device, T: int, H: int) -> Iterator[Check]:
    """Integers and copies: equal to what the CPU does."""
    K, s = 8, 40
    x = normal(device, T, H).bfloat16()
    ids = torch.rand(T, s).argsort(1)[:, :K]
    ids[T // 2 :, 1] = -1
    capacity = T * K + s * 127
    with poisoned():
        got = select("permute", device.type)(x, ids.to(device), s, alignment=128, capacity=capacity)
    want = select("permute", "any")(x.cpu(), ids, s, alignment=128, capacity=capacity)
    end = int(((want[3] + 127) // 128 * 128).sum())
    unequal = sum(int((mine.cpu() != theirs).sum()) for mine, theirs in zip(got[1:], want[1:], strict=True))
    yield Check(
        "permute", f"{T} x {H}", float(unequal + int((got[0][:end].cpu() != want[0][:end]).sum())), 0.0
    )
    weights = torch.rand(T, K, device=device)
    with poisoned():
        back = select("unpermute", device.type)(got[0], got[1], weights)
    taken = got[0].double()[got[1].clamp_min(0)] * ((got[1] >= 0) * weights.double()).unsqueeze(-1)
    yield Check("unpermute", f"{T} x {H}", relative_error(back, taken.sum(1)), BF16)


def elementwise(device: torch.device, T: int, H: int) -> Iterator[Check]:
    """Norm, rotation, activation, and quantisation, which equals the reference that quantises alike."""
    x, weight = normal(device, T, H).bfloat16(), normal(device, H).bfloat16()
    with poisoned():
        got = select("rms_norm", device.type)(x, weight, 1e-6)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    yield Check("rms_norm", f"{T} x {H}", relative_error(got, want), 2 * BF16)
    gate, up = x.chunk(2, -1)
    with poisoned():
        got = select("silu_mul", device.type)(gate, up)
    want = torch.nn.functional.silu(gate.double()) * up.double()
    yield Check("silu_mul", f"{T} x {H // 2}", relative_error(got, want), 2 * BF16)
    for rows_per_block in (1, 128):
        with poisoned():
            q, scales = select("quantize_fp8_block", device.type)(x, rows_per_block=rows_per_block)
        want_q, want_scales = select("quantize_fp8_block", "any")(x.cpu(), rows_per_block=rows_per_block)
        unequal = (q.float().cpu() != want_q.float()).sum() + (scales.cpu() != want_scales).sum()
        yield Check("quantize_fp8_block", f"{T} x {H}, {rows_per_block} x 128", float(unequal), 0.0)
    table = rope_table(dim=64, max_positions=T, theta=1e4, interleaved=True).to(device)
    heads = normal(device, T, 16, 64)
    turn = torch.view_as_complex(table.double().view(T, 1, 32, 2))
    want = torch.view_as_real(torch.view_as_complex(heads.double().view(T, 16, 32, 2)) * turn).flatten(-2)
    select("rope", device.type)(heads, table, interleaved=True)
    yield Check("rope", f"{T} x 16 x 64", relative_error(heads, want), FP32)


def grouped_gemm(device: torch.device, form: str, *, H: int) -> Check:
    """Uneven groups, some empty; the weights' own rounding is not the kernel's error."""
    counts = torch.tensor([1, 0, 129, 7, 128, 0, 16, 3], dtype=torch.int32, device=device)
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    x = normal(device, int(counts.sum()), H).bfloat16()
    weight = ENCODERS[form]((normal(device, 8, 384, H) / H**0.5).bfloat16())
    extra: dict[str, Any] = {}
    wide = x.double()
    if form == "fp8_block":
        x, extra["x_scales_NB"] = select("quantize_fp8_block", device.type)(x)
        wide = x.double() * extra["x_scales_NB"].double().repeat_interleave(128, 1)[:, :H]
    with poisoned():
        got = select("grouped_gemm", device.type)(x, weight, starts, counts, **extra)
    want = torch.full_like(got, torch.nan, dtype=torch.float64)
    for slot, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if count:
            want[start : start + count] = wide[start : start + count] @ decode(weight)[slot].double().t()
    return Check("grouped_gemm", f"{len(x)} rows, {H} -> 384, {form}", relative_error(got, want), BF16)


def attention(device: torch.device, *, context: int) -> Iterator[Check]:
    """Decode over a shuffled paged cache: latent attention of 16 heads, and 8 heads on 2 of keys."""
    D, S = 3, 64
    lengths = torch.tensor([context, 1, context // 2], device=device)
    blocks = -(-context // S)
    table = torch.randperm(D * blocks, device=device).view(D, blocks)
    plan = select("plan_decode", device.type)(table, lengths, max_context=context, block_tokens=S)

    def gathered(cache: Tensor, row: int) -> Tensor:
        return cache[table[row]].flatten(0, 1)[: int(lengths[row])].double()

    q, cache = normal(device, D, 16, 192).bfloat16(), normal(device, D * blocks, S, 576).bfloat16()
    kv_b = (normal(device, 16 * 256, 512) / 512**0.5).bfloat16()
    with poisoned():
        out = torch.empty(D, 16 * 128, dtype=q.dtype, device=device)
    select("mla_decode", device.type)(q, cache, plan, kv_b, 0.07, out_DX=out)
    w_uk, w_uv = kv_b.double().view(16, 256, 512).split(128, 1)
    for row in range(D):
        entries = gathered(cache, row)
        absorbed = torch.cat(
            (torch.einsum("an,anr->ar", q[row, :, :128].double(), w_uk), q[row, :, 128:]), -1
        )
        mixed = (absorbed @ entries.t() * 0.07).softmax(-1) @ entries[:, :512]
        want = torch.einsum("ar,avr->av", mixed, w_uv).flatten()
        error = relative_error(out[row, None], want[None])
        yield Check("mla_decode", f"{int(lengths[row])} tokens", error, 4 * BF16)

    q, cache = normal(device, D, 8, 128).bfloat16(), normal(device, D * blocks, S, 2 * 2 * 128).bfloat16()
    with poisoned():
        out = torch.empty(D, 8 * 128, dtype=q.dtype, device=device)
    select("gqa_decode", device.type)(q, cache, plan, 0.09, out_DX=out)
    for row in range(D):
        keys, values = (t.view(-1, 2, 128).repeat_interleave(4, 1) for t in gathered(cache, row).chunk(2, 1))
        scores = torch.einsum("ad,cad->ac", q[row].double(), keys) * 0.09
        want = torch.einsum("ac,cad->ad", scores.softmax(-1), values).flatten()
        error = relative_error(out[row, None], want[None])
        yield Check("gqa_decode", f"{int(lengths[row])} tokens", error, 2 * BF16)


def normal(device: torch.device, *shape: int) -> Tensor:
    """fp32, the same numbers on every device."""
    gen = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=gen).to(device)
