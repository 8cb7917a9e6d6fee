"""Rope: the table of cos and sin that all layers of a decoder share, and the rows of a step."""

import torch
from torch import Tensor

from moe_runtime.kernels.rope.reference import rope_table
from moe_runtime.models.context import StepContext
from moe_runtime.spec.model import RopeSpec


class Rope:
    """Table fp32 [max_positions, dim]; the layout is `rope_table`'s."""

    def __init__(self, spec: RopeSpec, *, max_positions: int, device: torch.device) -> None:
        self.dim = spec.dim
        self.interleaved = spec.interleaved
        self._table = rope_table(
            dim=spec.dim,
            max_positions=max_positions,
            theta=spec.theta,
            interleaved=spec.interleaved,
            factor=spec.factor,
            original_max_positions=spec.original_max_positions,
            beta_fast=spec.beta_fast,
            beta_slow=spec.beta_slow,
            truncate=spec.truncate,
            cos_sin_scale=spec.cos_sin_scale,
        ).to(device)

    def rows(self, step: StepContext) -> Tensor:
        """fp32 [T, dim]: cos and sin of the step's positions, looked up once per step."""
        rows: Tensor | None = step.memo.get("rope")
        if rows is None:
            rows = step.memo["rope"] = self._table.index_select(0, step.positions_T)
        return rows
