"""Skew: how unevenly experts are loaded in a deployment that is searched, drawn once per placement.

Owns which loads are assumed for a model and how finely they are drawn: a third of DeepSeek-V3's layers and
four draws give the balancedness of all layers and eight to half a percent. L layers, E experts.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.common import LIKE_RECORDED
from moe_runtime.virtual.cost.balance import EVEN_BALANCE, Balance, Drift, draw_balance
from moe_runtime.virtual.cost.constants import FittedFactors
from moe_runtime.virtual.cost.loads import deepseek_v3, is_recorded, place, power_law

Role = Literal["prefill", "decode"]
STRIDE = 3
DRAWS = 4
SYNTHETIC_LAYERS = 16


class _Placed(NamedTuple):
    role: Role
    ranks: int
    redundant: int
    sequence: int


class Skews:
    """Balances of one model's deployments, kept."""

    def __init__(
        self, model: ModelSpec, fitted: FittedFactors, *, ranks_per_node: int, balanced: bool
    ) -> None:
        self._model, self._balanced, self._ranks_per_node = model, balanced, ranks_per_node
        self._drift = Drift(common=fitted.drift_common, sequence=fitted.drift_sequence)
        self._loads: dict[Role, NDArray[np.float64]] = {}
        self._kept: dict[_Placed, Balance] = {}

    @property
    def recorded(self) -> bool:
        """Whether the model's own loads are known."""
        return is_recorded(self._model)

    def of(self, role: Role, ranks: int, redundant: int, tokens_per_sequence: float) -> Balance:
        """Spreads of an instance's placement; even on one rank."""
        if ranks == 1:
            return EVEN_BALANCE
        key = _Placed(role, ranks, redundant, max(1, round(tokens_per_sequence)))
        if key not in self._kept:
            self._kept[key] = self._draw(key)
        return self._kept[key]

    def _draw(self, key: _Placed) -> Balance:
        load_LE, router = self._load(key.role), self._model.moe.router
        ranks_per_node = min(self._ranks_per_node, key.ranks)
        placement = place(
            load_LE,
            ranks=key.ranks,
            ranks_per_node=ranks_per_node,
            redundant_experts=key.redundant,
            balanced=self._balanced,
            groups=router.num_groups,
        )
        return draw_balance(
            load_LE,
            placement,
            top_k=router.top_k,
            drift=self._drift,
            tokens_per_sequence=key.sequence,
            ranks_per_node=ranks_per_node,
            draws=DRAWS,
        )

    def _load(self, role: Role) -> NDArray[np.float64]:
        if role not in self._loads:
            experts = self._model.moe.num_experts
            self._loads[role] = (
                deepseek_v3(role)[::STRIDE]
                if self.recorded
                else power_law(SYNTHETIC_LAYERS, experts, LIKE_RECORDED)
            )
        return self._loads[role]
