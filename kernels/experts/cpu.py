"""experts on a CPU: slot after slot, empty ones skipped."""

import torch
from torch import Tensor

from moe_runtime.kernels.gated_mlp.cpu import gated_hidden
from moe_runtime.kernels.linear.cpu import packed_product


def experts(
    x_NH: Tensor,
    starts_s: Tensor,
    counts_s: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights_N: Tensor | None = None,
    *,
    masked: bool = False,
    rows_per_slot: int | None = None,
) -> Tensor:
    """As the reference, up to rounding; plain weights, both may be packed (then with four axes)."""
    del rows_per_slot
    y_NH = torch.empty_like(x_NH)
    counts = counts_s.tolist()
    if not masked and sum(counts) < x_NH.shape[0]:
        y_NH.zero_()
    for slot, (start, count) in enumerate(zip(starts_s.tolist(), counts, strict=True)):
        if not count:
            continue
        rows = slice(start, start + count)
        h_nI = gated_hidden(x_NH[rows], gate_up[slot])
        if down.dim() == 3:
            torch.mm(h_nI, down[slot].t(), out=y_NH[rows])
        else:
            y_nBb = packed_product(h_nI, down[slot]).transpose(0, 1)
            y_NH[rows].view(y_nBb.shape).copy_(y_nBb)
    return y_NH if weights_N is None else y_NH.mul_(weights_N[:, None])
