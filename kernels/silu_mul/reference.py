"""silu_mul: the gated activation of an MLP, and the variants of it that models use.

Sources: transformers' DeepSeek and Qwen MLPs; DeepSeek-V4's clamped one; transformers' modeling_gpt_oss.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["silu", "gpt_oss"]
GPT_OSS_ALPHA = 1.702


def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    kind: Kind = "silu",
    limit: float = math.inf,
    counts_s: Tensor | None = None,
) -> Tensor:
    """silu(gate) * up, elementwise; rounds to the dtype after each of the two, as transformers does.

    `limit`: first gate <= limit and |up| <= limit (DeepSeek-V4: 10, gpt-oss: 7). `gpt_oss`:
    gate * sigmoid(1.702 gate) * (up + 1). With a limit or as `gpt_oss` in fp32, rounded once.
    Gate and up may be any views of one product, halves or every second column.
    With `counts` int32 [s], they are [N, I], s equal parts of which only the first counts[i] rows hold
    anything (masked rows); the rest of the result is not written.
    """
    if kind == "silu" and limit == math.inf:
        return F.silu(gate) * up
    wide_gate, wide_up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    if kind == "gpt_oss":
        activated = wide_gate * torch.sigmoid(GPT_OSS_ALPHA * wide_gate) * (wide_up + 1)
    else:
        activated = F.silu(wide_gate) * wide_up
    return activated.to(gate.dtype)
