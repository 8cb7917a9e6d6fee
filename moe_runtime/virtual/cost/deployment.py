"""Setting: what one instance is made of, as far as its step times depend on it. Plain data with checks.

Knows no formula. A plan's deployment is one source of it, a published experiment another.
"""

from dataclasses import dataclass
from typing import Literal

from moe_runtime.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of weights and rows: dense and expert products, attention core, cache, rows out and back."""

    dense: str = "float8_e4m3"
    experts: str = "float8_e4m3"
    attention: str = "bfloat16"
    cache: str = "bfloat16"
    dispatch: str = "float8_e4m3"
    combine: str = "bfloat16"
    head: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One instance.

    machine          a name of `spec.hardware.HARDWARE`
    ranks            of the instance
    ranks_per_node   ranks that share the scale-up links of a node (ignored where the domain is larger)
    slots_per_rank   expert slots per MoE layer and rank
    experts          "expert_parallel": spread over all ranks; "tensor_parallel": every rank holds a slice of
                     each expert, and the whole model is one tensor-parallel group
    tensor_parallel  ranks that share one batch in attention; all of them with tensor-parallel experts
    library          of links.yaml; None: the machine's default
    groups_stay      whole expert groups of group-limited routing sit on a node
    """

    machine: str
    ranks: int
    ranks_per_node: int = 8
    slots_per_rank: int = 1
    experts: Literal["expert_parallel", "tensor_parallel"] = "expert_parallel"
    tensor_parallel: int = 1
    library: str | None = None
    groups_stay: bool = True
    precision: Precision = Precision()

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "slots_per_rank", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.ranks % self.tensor_parallel:
            raise InputError(f"tensor_parallel = {self.tensor_parallel}: must divide {self.ranks} ranks")
        if self.experts == "tensor_parallel" and self.tensor_parallel != self.ranks:
            raise InputError(
                f"tensor_parallel = {self.tensor_parallel}: with tensor-parallel experts, all {self.ranks}"
            )

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)
