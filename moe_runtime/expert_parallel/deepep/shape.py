"""What one DeepEP buffer is built for, and whether DeepEP can carry it.

Owns the translation of our sizes into DeepEP's (experts are slots here) and the refusal by name.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from moe_runtime.errors import PlanError
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.spec.limits import DispatchSizes, LimitKind, violations

Mode = Literal["deepep_normal", "deepep_low_latency", "deepep_elastic"]
PayloadName = Literal["bfloat16", "float8_e4m3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """ranks           of the instance: DeepEP's group
    slots_per_rank  physical slots of a rank: DeepEP's local experts
    max_tokens      most rows a rank sends in one dispatch, equal on all ranks
    payload         what a dispatch carries; float8_e4m3 has one fp32 scale per 128 values
    dtype           of the rows on both sides
    """

    ranks: int
    slots_per_rank: int
    hidden: int
    top_k: int
    max_tokens: int
    ranks_per_node: int = 8
    payload: PayloadName = "bfloat16"
    dtype: torch.dtype = torch.bfloat16

    @property
    def slots(self) -> int:
        return self.ranks * self.slots_per_rank

    @property
    def fp8(self) -> bool:
        return self.payload == "float8_e4m3"

    @property
    def wire_row_bytes(self) -> int:
        """A row as it travels in a dispatch, its scales included."""
        return Payload(self.payload).row_bytes(self.hidden)

    @property
    def sizes(self) -> DispatchSizes:
        return DispatchSizes(
            ranks=self.ranks,
            slots=self.slots,
            hidden=self.hidden,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            row_bytes=Payload(self.payload).value_bytes(self.hidden),
            nodes=-(-self.ranks // self.ranks_per_node),
        )

    def require(self, mode: Mode) -> None:
        """PlanError that names every hard limit of `mode` which this shape breaks."""
        problems = [f"{mode}: {text}" for text in self._broken(mode, "hard")]
        if self.dtype != torch.bfloat16:
            problems.append(f"{mode}: rows are {self.dtype}, DeepEP carries torch.bfloat16")
        if problems:
            raise PlanError.together([PlanError("dispatch.backend", p, value="deepep") for p in problems])

    def warnings(self, mode: Mode) -> tuple[str, ...]:
        """A line per `tested` limit that this shape goes beyond."""
        return tuple(self._broken(mode, "tested"))

    def _broken(self, mode: Mode, kind: LimitKind) -> list[str]:
        return [v.message for v in violations(mode, self.sizes) if v.limit.kind == kind]
