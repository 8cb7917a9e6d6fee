"""experts on a CPU: slot after slot, empty ones skipped, each with the path its row count likes."""

import torch
from torch import Tensor

from moe_runtime.kernels.gated_mlp.cpu import gated_hidden
from moe_runtime.kernels.linear.cpu import SWAP_ROWS, split_blocks, split_product, swapped_product


def experts(
    x_NH: Tensor,
    starts_s: Tensor,
    counts_s: Tensor,
    gate_up_s2IH: Tensor,
    down_sHI: Tensor,
    weights_N: Tensor | None = None,
) -> Tensor:
    """As the reference, up to rounding."""
    y_NH = torch.empty_like(x_NH)
    counts = counts_s.tolist()
    if sum(counts) < x_NH.shape[0]:
        y_NH.zero_()
    for slot, (start, count) in enumerate(zip(starts_s.tolist(), counts, strict=True)):
        if count:
            rows = slice(start, start + count)
            _down(gated_hidden(x_NH[rows], gate_up_s2IH[slot]), down_sHI[slot], y_NH[rows])
    return y_NH if weights_N is None else y_NH.mul_(weights_N[:, None])


def _down(h_TI: Tensor, down_HI: Tensor, y_TH: Tensor) -> None:
    """Write the down projection into the rows of the result."""
    T, H = y_TH.shape
    blocks = split_blocks(H, T, h_TI.dtype)
    if not blocks:
        torch.mm(h_TI, down_HI.t(), out=y_TH)
    elif T <= SWAP_ROWS:
        y_TH.copy_(swapped_product(h_TI, down_HI, blocks).view(H, T).t())
    else:
        y_TH.view(T, blocks, -1).copy_(split_product(h_TI, down_HI, blocks).transpose(0, 1))
