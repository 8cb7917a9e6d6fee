"""route on a CPU, batch-invariant (see `fixed_rows`): tiles of a fixed shape, whose real rows all go
through the vector loops of the scores.
"""

import torch
from torch import Tensor

from moe_runtime.kernels.fixed_rows import ROWS
from moe_runtime.kernels.route import cpu
from moe_runtime.kernels.route.reference import Scoring

TAIL = 64  # elements at the end of a tensor that a vector loop may leave to a scalar one


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
    """As the reference, up to the rounding of the scores."""
    ids, weights = [], []
    for begin in range(0, len(logits_TE), ROWS):
        count = len(logits_TE[begin : begin + ROWS])
        ids_RK, weights_RK = cpu.route(
            _tile(logits_TE[begin : begin + ROWS]),
            bias_E,
            top_k=top_k,
            scoring=scoring,
            num_groups=num_groups,
            kept_groups=kept_groups,
            masked_group_score=masked_group_score,
            normalize=normalize,
            epsilon=epsilon,
            scale=scale,
            chosen_TK=None if chosen_TK is None else _tile(chosen_TK[begin : begin + ROWS]),
        )
        ids.append(ids_RK[:count])
        weights.append(weights_RK[:count])
    if not ids:
        return torch.zeros(0, top_k, dtype=torch.int64), torch.zeros(0, top_k)
    return torch.cat(ids), torch.cat(weights)


def _tile(x_tE: Tensor) -> Tensor:
    """The rows, then zeros: ROWS and TAIL more, so that no real row of any [R, *] lies in the tail."""
    return torch.cat((x_tE, x_tE.new_zeros(ROWS + TAIL - len(x_tE), x_tE.shape[1])))
