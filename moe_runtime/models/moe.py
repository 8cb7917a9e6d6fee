"""Router, experts and shared experts of a MoE layer; the exchange between them is the layer's.

T rows, H hidden, E experts, K top-k, s local slots, N received rows, I intermediate.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_runtime.expert_parallel.buffer import MaskedRows, Rows
from moe_runtime.models.mlp import GatedMlp
from moe_runtime.models.ops import Ops
from moe_runtime.models.parameters import empty_parameter
from moe_runtime.spec.model import ModelSpec, MoeSpec


class Route(NamedTuple):
    """expert_ids int64 [T, K]; weights fp32 [T, K], the routed scale included."""

    expert_ids_TK: Tensor
    weights_TK: Tensor


class Router(nn.Module):
    """Scores in fp32, whatever the model's dtype. Every token also chooses the shared experts in slots."""

    correction_bias: Tensor | None

    def __init__(
        self, moe: MoeSpec, hidden: int, *, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._ops, r = ops, moe.router
        self.weight = empty_parameter(moe.num_experts, hidden, dtype=dtype, device=device)
        self.correction_bias = (
            empty_parameter(moe.num_experts, dtype=torch.float32, device=device)
            if r.correction_bias
            else None
        )
        self._shared_1K = torch.arange(moe.num_experts, moe.slot_experts, device=device)[None]
        self._how = {
            "top_k": r.top_k,
            "scoring": r.scoring,
            "num_groups": r.num_groups,
            "kept_groups": r.kept_groups,
            "masked_group_score": r.masked_group_score,
            "normalize": r.normalize,
            "epsilon": r.weight_epsilon,
            "scale": r.scale,
        }

    def prepare(self) -> None:
        """Widen the weight to fp32 once, and pack it."""
        self.weight.data = self._ops.pack(self.weight.data.float())

    def forward(self, h_TH: Tensor) -> Route:
        """Experts and weights of each row: top-k, then the shared experts in slots with weight 1."""
        logits_TE = self._ops.linear(h_TH.float(), self.weight.float())
        route = Route(*self._ops.route(logits_TE, self.correction_bias, **self._how))
        T, shared = h_TH.shape[0], self._shared_1K.shape[1]
        if not shared:
            return route
        return Route(
            torch.cat([route.expert_ids_TK, self._shared_1K.expand(T, shared)], 1),
            torch.cat([route.weights_TK, route.weights_TK.new_ones(T, shared)], 1),
        )


class Experts(nn.Module):
    """The experts in this rank's slots: plain tensors with a leading slot axis, one byte range per slot."""

    def __init__(
        self,
        moe: MoeSpec,
        hidden: int,
        *,
        slots: int,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._ops = ops
        self.gate_up = empty_parameter(slots, 2 * moe.intermediate, hidden, dtype=dtype, device=device)
        self.down = empty_parameter(slots, hidden, moe.intermediate, dtype=dtype, device=device)

    def prepare(self) -> None:
        """Pack the weights; a slot keeps its byte range, so ranks may copy each other's slots as they are."""
        self.gate_up.data = self._ops.pack(self.gate_up.data, parts=2)
        self.down.data = self._ops.pack(self.down.data)

    def forward(self, rows: Rows) -> Tensor:
        """In the shape of `rows.x` and the dtype of the weights: each row through the expert of its slot."""
        x = rows.values(self.down.dtype)
        weights = None if rows.weights is None else rows.weights.flatten()
        y_NH: Tensor = self._ops.experts(
            x.flatten(0, -2),
            rows.starts,
            rows.counts,
            self.gate_up,
            self.down,
            weights,
            masked=isinstance(rows, MaskedRows),
            rows_per_slot=rows.rows_per_slot if isinstance(rows, MaskedRows) else None,
        )
        return y_NH.view(x.shape)


class MoeBlock(nn.Module):
    """The parts of a MoE layer's feed-forward half, under the names the loader knows."""

    shared_experts: GatedMlp | None

    def __init__(
        self,
        spec: ModelSpec,
        *,
        slots_per_rank: int,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        moe = spec.moe
        self.router = Router(moe, spec.hidden, ops=ops, dtype=dtype, device=device)
        self.experts = Experts(moe, spec.hidden, slots=slots_per_rank, ops=ops, dtype=dtype, device=device)
        self.shared_experts = (
            GatedMlp(spec.hidden, moe.shared_intermediate, ops=ops, dtype=dtype, device=device)
            if moe.shared_intermediate
            else None
        )

    def share(self, h_TH: Tensor, *, add_to: Tensor) -> Tensor:
        """`add_to` [T, H] plus the shared experts' output, in place; as it is without any."""
        return add_to if self.shared_experts is None else self.shared_experts(h_TH, add_to=add_to)

    def prepare(self) -> None:
        """Pack the weights of all parts."""
        self.router.prepare()
        self.experts.prepare()
        if self.shared_experts is not None:
            self.shared_experts.prepare()
