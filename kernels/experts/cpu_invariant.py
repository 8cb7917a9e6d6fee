"""experts on a CPU, batch-invariant (see `fixed_rows`): a row meets the same arithmetic in every slot."""

import torch
from torch import Tensor

from moe_runtime.kernels import fixed_rows


def experts(
    x_NH: Tensor,
    starts_s: Tensor,
    counts_s: Tensor,
    gate_up_s2IH: Tensor,
    down_sHI: Tensor,
    weights_N: Tensor | None = None,
    *,
    masked: bool = False,
    rows_per_slot: int | None = None,
) -> Tensor:
    """As the reference, up to rounding; plain weights."""
    del masked, rows_per_slot
    y_NH = torch.zeros_like(x_NH)
    for slot, (start, count) in enumerate(zip(starts_s.tolist(), counts_s.tolist(), strict=True)):
        if count:
            rows = slice(start, start + count)
            y_NH[rows] = fixed_rows.gated_mlp(x_NH[rows], gate_up_s2IH[slot], down_sHI[slot])
    if weights_N is None:
        return y_NH
    return (y_NH.float() * weights_N[:, None]).to(x_NH.dtype)
