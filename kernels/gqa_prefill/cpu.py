"""gqa_prefill on a CPU: entries of many segments gathered at once, attended per block of query rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.gqa_decode.reference import split_heads
from moe_runtime.kernels.mla_decode.cpu import masked_softmax
from moe_runtime.kernels.paged.cpu import PrefillGroup, query_blocks


def gqa_prefill(
    q_TAd: Tensor,
    cache_BSE: Tensor,
    plan: Sequence[PrefillGroup],
    scale: float,
    *,
    out_TX: Tensor,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> None:
    """As the reference, up to rounding."""
    (T, A, d), E = q_TAd.shape, cache_BSE.shape[2]
    kv_heads = E // (2 * d)
    q_ATd, out_TAd = q_TAd.transpose(0, 1), out_TX.view(T, A, d)
    for group in plan:
        entries_ME = cache_BSE.index_select(0, group.blocks).view(-1, E).to(q_TAd.dtype)
        k_hMd, v_hMd = split_heads(entries_ME, d)
        for rows, keys, ahead in query_blocks(group.parts):
            n = rows.stop - rows.start
            # The g query heads of a key/value head are g * n rows against the same keys.
            q_hgd = (q_ATd[:, rows] * scale).reshape(kv_heads, -1, d)
            scores_hgC = torch.bmm(q_hgd, k_hMd[:, keys].transpose(1, 2))
            scores_AnC = scores_hgC.view(A, n, -1)
            scores_AnC[..., scores_AnC.shape[2] - n :].masked_fill_(ahead, float("-inf"))
            if 0 < window < scores_AnC.shape[2]:
                C = scores_AnC.shape[2]
                behind_nC = torch.ones(n, C, dtype=torch.bool).tril(C - n - window)
                scores_AnC.masked_fill_(behind_nC, float("-inf"))
            sinks_An = None if sinks_A is None else sinks_A.unsqueeze(-1).expand(A, n)
            probs_AnC = masked_softmax(scores_AnC, None, sinks_An)
            probs_hgC = probs_AnC.view(kv_heads, -1, scores_AnC.shape[2])
            out_TAd[rows] = torch.bmm(probs_hgC, v_hMd[:, keys]).view(A, n, d).transpose(0, 1)
