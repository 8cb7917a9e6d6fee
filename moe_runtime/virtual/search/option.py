"""Option: one way to run one phase on one instance, and what it gives. Data only.

Owns the words for kinds of instances. A group is what shares one batch of sequences: a rank, or the ranks of
tensor-parallel attention.
"""

from dataclasses import dataclass, replace
from typing import Literal

from moe_runtime.plan.budget import MemoryBudget
from moe_runtime.virtual.cost.shapes import StepCost

Phase = Literal["prefill", "decode", "unified"]
Kind = Literal["wide EP", "EP in a node", "EP, tensor-parallel attention", "tensor parallelism", "one rank"]
KINDS: tuple[Kind, ...] = (
    "wide EP",
    "EP in a node",
    "EP, tensor-parallel attention",
    "tensor parallelism",
    "one rank",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is chosen for an instance.

    ranks         of the instance; of all of them `group` share one batch of sequences
    whole         every rank holds a slice of each expert: one tensor-parallel group
    redundant     experts, per layer
    sequences     decoding sequences of a group
    chunk         prompt tokens of a group in a step, at most
    cut           unified: chunks are about so many times what replaces the sequences that end in a step
    queries       rows of a decoding sequence: 1, or 1 and a draft
    backend       of dispatch; max_tokens rows of a rank in one round
    """

    phase: Phase
    ranks: int
    group: int = 1
    whole: bool = False
    redundant: int = 0
    micro_batches: Literal[1, 2] = 1
    sequences: int = 0
    chunk: int = 0
    cut: int = 1
    queries: int = 1
    backend: str = "deepep"
    max_tokens: int = 1

    @property
    def groups(self) -> int:
        return self.ranks // self.group

    @property
    def written(self) -> bool:
        """Whether a plan of this version can say it: neither tensor parallelism nor drafts."""
        return self.group == 1 and self.queries == 1

    def kind(self, ranks_per_node: int) -> Kind:
        if self.ranks == 1:
            return "one rank"
        if self.whole:
            return "tensor parallelism"
        if self.group > 1:
            return "EP, tensor-parallel attention"
        return "EP in a node" if self.ranks <= ranks_per_node else "wide EP"

    @property
    def label(self) -> str:
        """Short: EP72, TP8, EP32 x TP4."""
        name = f"TP{self.ranks}" if self.whole else f"EP{self.ranks}"
        return name if self.whole or self.group == 1 else f"{name} x TP{self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A choice that fits, in steady state with full batches.

    rate     requests/s of the instance
    step     seconds
    tpot     seconds a token of one user; 0 in prefill
    chunks   steps that a prompt takes (prefill, unified)
    budget   of a rank, with the KV blocks that the sequences need
    blocks   KV blocks that they need
    """

    choice: Choice
    rate: float
    step: float
    tpot: float
    chunks: int
    cost: StepCost
    budget: MemoryBudget
    blocks: int


def bare(choice: Choice) -> Choice:
    """The choice without its batch sizes and what they ask of a backend."""
    return replace(choice, sequences=0, chunk=0, max_tokens=1, backend="")
