"""StepContext: all that a model sees of a step, as device tensors and host integers.

The engine makes one per micro-batch from StepInputs. The model never sees the scheduler,
process groups or the plan. T rows, D decode rows, H hidden, B blocks per sequence.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from moe_runtime.spec.limits import DispatchMode

Transfer = Literal["dispatch", "combine"]


class Clock(Protocol):
    """Exclusive phase times of a step: `enter` ends the current phase and begins another.

    `at` tells which micro-batch and layer the phases that follow belong to.
    """

    def enter(self, phase: str) -> None: ...

    def at(self, micro_batch: int, layer: int) -> None: ...


class NoClock:
    """A clock that measures nothing."""

    def enter(self, phase: str) -> None:
        return None

    def at(self, micro_batch: int, layer: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Rows [start, stop) are consecutive tokens of one sequence with `context` cached before them.

    `blocks` int64 [ceil((context + stop - start) / block_tokens)]: the sequence's block indices.
    """

    start: int
    stop: int
    context: int
    blocks: Tensor


@dataclass(slots=True)
class StepContext:
    """One micro-batch of one step.

    token_ids_T      int64 [T], no negative references left
    positions_T      int64 [T]
    kv_slots_T       int64 [T]: row of the flattened cache [blocks * block_tokens, entry] to write
    num_decode       rows [0, num_decode) are decode rows, one per sequence
    decode_blocks_DB int64 [D, B]: block indices, padded with 0 (masked by decode_context_D)
    decode_context_D int64 [D]: tokens attended to, the row itself included
    max_context      largest decode_context_D (0 if none): a host integer
    segments         the prefill rows, in row order
    kv_cache         per layer [num_blocks, block_tokens, entry]
    clock            phases: attention, routing, dispatch, experts, combine, other
    dispatch_mode    whose buffer the MoE layers use, agreed by all ranks
    rounds           dispatch rounds, agreed by all ranks (>= 1)
    round_tokens     rows per round
    shared_beside    the transfer beside which the shared experts run, of the first round; the order's
    memo             what one layer works out and the others reuse (positions' cos and sin, gather plans)
    """

    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    num_decode: int
    decode_blocks_DB: Tensor
    decode_context_D: Tensor
    max_context: int
    segments: tuple[PrefillSegment, ...]
    kv_cache: list[Tensor]
    clock: Clock
    rounds: int
    round_tokens: int
    dispatch_mode: DispatchMode = "normal"
    shared_beside: Transfer = "dispatch"
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.token_ids_T.device
