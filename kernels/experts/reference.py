"""experts: the gated MLPs of a rank's slots over rows grouped by slot.

N rows, s local slots, H hidden, I intermediate.
"""

import torch
from torch import Tensor

from moe_runtime.kernels.gated_mlp.reference import gated_mlp


def experts(
    x_NH: Tensor,
    starts_s: Tensor,
    counts_s: Tensor,
    gate_up_s2IH: Tensor,
    down_sHI: Tensor,
    weights_N: Tensor | None = None,
) -> Tensor:
    """[N, H]: row n of slot i, starts[i] <= n < starts[i] + counts[i], through that slot's MLP.

    Rows in no slot come out as zero. `weights` fp32: multiply each row (in fp32) on its way out.
    """
    y_NH = torch.zeros_like(x_NH)
    for slot, (start, count) in enumerate(zip(starts_s.tolist(), counts_s.tolist(), strict=True)):
        rows = slice(start, start + count)
        y_NH[rows] = gated_mlp(x_NH[rows], gate_up_s2IH[slot], down_sHI[slot])
    if weights_N is None:
        return y_NH
    return (y_NH.float() * weights_N[:, None]).to(x_NH.dtype)
