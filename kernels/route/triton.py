"""route in one launch: scores, bias, groups, top-k and weights of a few tokens per program, all in registers.

T tokens, E experts, K top-k, G groups. A program holds all experts of its tokens. Each of the K rounds takes
the greatest of 64-bit keys made of the choice and the expert, so that no two are equal: equal choices go to
the lower expert, and experts of dropped groups (-inf) still come before none.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels import shapes
from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.route.reference import Scoring, best_of_group

TOKENS = 4  # per program, a warp for each
TAKEN = tl.constexpr(-(2**63))  # below every key, that of -inf included


@triton.jit
def _log1p(e):
    """log(1 + e) for e in [0, 1], with a relative error of 1e-7: 2 atanh(e / (2 + e)) as a series."""
    s = e / (2.0 + e)
    q = s * s
    p = 1.0 / 13.0 + q * (1.0 / 15.0)
    p = 1.0 / 9.0 + q * (1.0 / 11.0 + q * p)
    p = 1.0 / 5.0 + q * (1.0 / 7.0 + q * p)
    return 2.0 * s * (1.0 + q * (1.0 / 3.0 + q * p))


@triton.jit
def _score(x, valid, SCORING: tl.constexpr):
    if SCORING == "sigmoid":
        return tl.div_rn(1.0, 1.0 + tl.exp(-x))
    elif SCORING == "softmax":
        e = tl.where(valid, tl.exp(x - tl.max(tl.where(valid, x, float("-inf")), 1)[:, None]), 0.0)
        return tl.div_rn(e, tl.sum(e, 1)[:, None])
    elif SCORING == "sqrt_softplus":
        return tl.sqrt_rn(tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x))))
    else:
        return x


@triton.jit
def _keys(value, index):
    """int64, ordered as `value`, then by lower index; -0.0 counts as 0.0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _kept_groups(
    choice, valid, index, G: tl.constexpr, GP: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr
):
    """[tokens, GP]: 1 for the best groups; a group's score is the sum of its BEST best choices."""
    BT: tl.constexpr = choice.shape[0]
    SIZE: tl.constexpr = choice.shape[1] // GP
    members = tl.reshape(tl.where(valid, choice, float("-inf")), (BT, GP, SIZE))
    score = tl.max(members, 2)
    if BEST == 2:
        keys = tl.reshape(_keys(tl.where(valid, choice, float("-inf")), index), (BT, GP, SIZE))
        rest = tl.where(keys == tl.max(keys, 2)[:, :, None], float("-inf"), members)
        score += tl.max(rest, 2)
    group = tl.arange(0, GP)[None, :]
    keys = tl.where(group < G, _keys(score, group), TAKEN)
    kept = tl.zeros((BT, GP), tl.int32)
    for _ in tl.static_range(KEPT):
        best = keys == tl.max(keys, 1)[:, None]
        kept = tl.where(best, 1, kept)
        keys = tl.where(best, TAKEN, keys)
    return kept


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    chosen_ptr,
    ids_ptr,
    weights_ptr,
    T,
    logits_stride,
    masked_score,
    epsilon,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    SCORING: tl.constexpr,
    BIAS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BT: tl.constexpr,
):
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = (token < T)[:, None]
    place = tl.arange(0, GP * SIZE)  # group-major, groups padded to SIZE places
    if SIZE * G == E:
        expert, real = place, place < E
    else:
        expert = place // SIZE * (E // G) + place % SIZE
        real = (place // SIZE < G) & (place % SIZE < E // G)
    valid = real[None, :] & (token >= 0)[:, None]
    at = token.to(tl.int64)[:, None] * logits_stride + expert[None, :]
    x = tl.load(logits_ptr + at, mask=valid & live, other=0.0).to(tl.float32)
    scores = _score(x, valid, SCORING)
    index = expert[None, :] + tl.zeros((BT, 1), tl.int32)
    keys = tl.zeros((BT, GP * SIZE), tl.int64)
    if not CHOSEN:
        choice = scores
        if BIAS:
            choice += tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)[None, :]
        if G > 1:
            kept = _kept_groups(choice, valid, index, G, GP, KEPT, BEST)
            inside = tl.reshape(tl.broadcast_to(kept[:, :, None], (BT, GP, SIZE)), (BT, GP * SIZE))
            choice = tl.where(inside > 0, choice, masked_score)
        keys = tl.where(valid, _keys(choice, index), TAKEN)

    column = tl.arange(0, KP)[None, :]
    ids = tl.zeros((BT, KP), tl.int64)
    weights = tl.zeros((BT, KP), tl.float32)
    top = tl.zeros((BT,), tl.float32)
    for k in tl.static_range(K):
        if CHOSEN:
            taken = tl.load(chosen_ptr + token.to(tl.int64) * K + k, mask=token < T, other=0)
            best = (index == taken[:, None]) & valid
        else:
            most = tl.max(keys, 1)
            best = keys == most[:, None]
            taken = 0x7FFFFFFF - (most & 0x7FFFFFFF)
            keys = tl.where(best, TAKEN, keys)
        weight = tl.sum(tl.where(best, scores, 0.0), 1)
        top = weight if k == 0 else tl.maximum(top, weight)
        ids = tl.where(column == k, taken.to(tl.int64)[:, None], ids)
        weights = tl.where(column == k, weight[:, None], weights)
    if SCORING == "softmax_selected":
        weights = tl.where(column < K, tl.exp(weights - top[:, None]), 0.0)
        weights = tl.div_rn(weights, _sum_in_order(weights, K)[:, None])
    if NORMALIZE:
        weights = tl.div_rn(weights, (_sum_in_order(weights, K) + epsilon)[:, None])
    out = token.to(tl.int64)[:, None] * K + column
    tl.store(ids_ptr + out, ids, mask=live & (column < K))
    tl.store(weights_ptr + out, weights * scale, mask=live & (column < K))


@triton.jit
def _sum_in_order(weights, K: tl.constexpr):
    """The columns added one after the other, as the reference does."""
    column = tl.arange(0, weights.shape[1])[None, :]
    total = tl.sum(tl.where(column == 0, weights, 0.0), 1)
    for k in tl.static_range(1, K):
        total += tl.sum(tl.where(column == k, weights, 0.0), 1)
    return total


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    *,
    top_k: int,
    scoring: Scoring,
    num_groups: int,
    kept_groups: int,
    masked_group_score: float,
    normalize: bool,
    epsilon: float,
    scale: float,
    chosen_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference; scores differ from torch's by the rounding of exp (relative 1e-6). LOCAL."""
    T, E = logits_TE.shape
    if logits_TE.stride(1) != 1:
        logits_TE = logits_TE.contiguous()
    ids_TK = torch.empty(T, top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(T, top_k, dtype=torch.float32, device=logits_TE.device)
    constants = _constants(E, top_k, num_groups, kept_groups, scoring)
    _route[(triton.cdiv(T, TOKENS),)](
        logits_TE,
        logits_TE if bias_E is None else bias_E.contiguous(),
        ids_TK if chosen_TK is None else chosen_TK.contiguous(),
        ids_TK,
        weights_TK,
        T,
        logits_TE.stride(0),
        masked_group_score,
        epsilon,
        scale,
        **constants,
        BIAS=bias_E is not None,
        CHOSEN=chosen_TK is not None,
        NORMALIZE=normalize,
        num_warps=TOKENS,
        enable_fp_fusion=False,
    )
    return ids_TK, weights_TK


def _constants(
    experts: int, top_k: int, num_groups: int, kept_groups: int, scoring: Scoring
) -> dict[str, int | str]:
    return {
        "E": experts,
        "K": top_k,
        "KP": triton.next_power_of_2(top_k),
        "G": num_groups,
        "GP": triton.next_power_of_2(num_groups),
        "SIZE": triton.next_power_of_2(experts // num_groups),
        "KEPT": kept_groups,
        "BEST": best_of_group(scoring),
        "SCORING": scoring,
        "BT": TOKENS,
    }


def aot_cases(target: Target) -> Iterator[AotCase]:
    """One configuration per model's router."""
    for model in shapes.MODELS:
        sigmoid = model.scoring == "sigmoid"
        yield AotCase(
            operation="route",
            label=f"{model.name} {model.scoring} {model.experts}/{model.top_k}",
            kernel=_route,
            signature={
                "logits_ptr": "*fp32",
                "bias_ptr": "*fp32",
                "chosen_ptr": "*i64",
                "ids_ptr": "*i64",
                "weights_ptr": "*fp32",
                "T": "i32",
                "logits_stride": "i32",
                "masked_score": "fp32",
                "epsilon": "fp32",
                "scale": "fp32",
            },
            constants={
                **_constants(model.experts, model.top_k, model.groups, model.kept_groups, model.scoring),
                "BIAS": sigmoid,
                "CHOSEN": False,
                "NORMALIZE": True,
            },
            aligned=frozenset({"logits_ptr", "bias_ptr", "ids_ptr", "weights_ptr", "logits_stride"}),
            num_warps=TOKENS,
            fp_fusion=False,
            representative=target.name == "sm_100" and model is shapes.DEEPSEEK_V3,
        )
