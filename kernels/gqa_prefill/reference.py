"""gqa_prefill: chunks of prompts against the paged cache, grouped-query attention.

T rows, n rows of a segment; otherwise as gqa_decode.
"""

from collections.abc import Sequence

from torch import Tensor

from moe_runtime.kernels.gqa_decode.reference import split_heads
from moe_runtime.kernels.mla_prefill.reference import causal_attention
from moe_runtime.kernels.paged.reference import Segment, sequence_entries


def gqa_prefill(
    q_TAd: Tensor,
    cache_BSE: Tensor,
    plan: Sequence[Segment],
    scale: float,
    *,
    out_TX: Tensor,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> None:
    """Write the rows of the segments to `out` [T, A * d]; other rows are left alone.

    `window` and `sinks` as in gqa_decode.
    """
    heads, head_dim = q_TAd.shape[1:]
    for segment in plan:
        rows = slice(segment.start, segment.stop)
        total = segment.context + segment.stop - segment.start
        k_hCd, v_hCd = split_heads(
            sequence_entries(cache_BSE, segment.blocks, total).to(q_TAd.dtype), head_dim
        )
        group = heads // k_hCd.shape[0]
        k_ACd, v_ACd = k_hCd.repeat_interleave(group, 0), v_hCd.repeat_interleave(group, 0)
        q_AnQ = q_TAd[rows].transpose(0, 1)
        out = causal_attention(q_AnQ, k_ACd, v_ACd, segment.context, scale, window=window, sinks_A=sinks_A)
        out_TX[rows] = out.transpose(0, 1).flatten(1)
