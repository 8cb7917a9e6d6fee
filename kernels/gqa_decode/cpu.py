"""gqa_decode on a CPU: batched products over groups of sequences, one key/value head after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.mla_decode.cpu import masked_softmax
from moe_runtime.kernels.paged.cpu import DecodeGroup


def gqa_decode(
    q_DAd: Tensor,
    cache_BSE: Tensor,
    plan: Sequence[DecodeGroup],
    scale: float,
    *,
    out_DX: Tensor,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> None:
    """As the reference, up to rounding."""
    (D, A, d), E = q_DAd.shape, cache_BSE.shape[2]
    kv_heads = E // (2 * d)
    g = A // kv_heads
    flat_cache, scaled_DAd, out_DAd = cache_BSE.view(-1, E), q_DAd * scale, out_DX.view(D, A, d)
    for group in plan:
        q_GAd = scaled_DAd if group.members is None else scaled_DAd.index_select(0, group.members)
        G = len(q_GAd)
        entries_GCE = flat_cache.index_select(0, group.rows).view(G, -1, E).to(q_GAd.dtype)
        mixed_GAd = torch.empty_like(q_GAd)
        masked_G1C = _hidden(group, entries_GCE.shape[1], window)
        for head in range(kv_heads):
            queries, keys = slice(head * g, (head + 1) * g), slice(head * d, (head + 1) * d)
            values = slice((kv_heads + head) * d, (kv_heads + head + 1) * d)
            scores_GgC = torch.bmm(q_GAd[:, queries], entries_GCE[..., keys].transpose(1, 2))
            sinks_g = None if sinks_A is None else sinks_A[queries]
            probs_GgC = masked_softmax(scores_GgC, masked_G1C, sinks_g)
            mixed_GAd[:, queries] = torch.bmm(probs_GgC, entries_GCE[..., values])
        if group.members is None:
            out_DAd.copy_(mixed_GAd)
        else:
            out_DAd.index_copy_(0, group.members, mixed_GAd)


def _hidden(group: DecodeGroup, C: int, window: int) -> Tensor | None:
    """bool, broadcast to [G, 1, C], where a token is padding or before its row's window; None: nowhere."""
    padded_G1C = group.padded_G1C
    if not 0 < window < C:
        return padded_G1C
    if padded_G1C is None:
        return torch.arange(C) < C - window
    lengths_G11 = C - padded_G1C.sum(-1, keepdim=True)
    return padded_G1C | (torch.arange(C) < lengths_G11 - window)
