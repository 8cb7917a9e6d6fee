"""What a step is made of, and what it costs: the data that goes into the cost model and comes out.

Owns plain data only. A step is described by the work of every rank of one instance; its cost is in
seconds, split into parts that sum to the whole. R ranks; knows no hardware and no formula.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_runtime.spec.limits import DispatchMode

Part = Literal[
    "attention",
    "dense",
    "router",
    "experts",
    "dispatch",
    "combine",
    "collective",
    "launch",
    "other",
    "imbalance",
]
Bound = Literal["compute", "hbm", "link", "imbalance", "launch"]
PARTS: tuple[Part, ...] = get_args(Part)
BOUNDS: tuple[Bound, ...] = get_args(Bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """One step of an instance. Arrays [R], an entry per attention group (a rank, without tensor-parallel
    attention); idle ones are zeros.

    decode_sequences_R  sequences that decode
    decode_context_R    the sum of their contexts, tokens
    prefill_tokens_R    prompt tokens computed in this step
    prefill_pairs_R     (query, key) pairs of these tokens: sum over tokens of the context each attends to
    prefill_prefix_R    tokens already cached of the sequences in prefill (their keys are read)
    queries             rows per decoding sequence: 1, or 1 + drafts with multi-token prediction
    mode, micro_batches, rounds as agreed for the step; a micro-batch's rows are dispatched in `rounds`
    """

    decode_sequences_R: NDArray[np.float64]
    decode_context_R: NDArray[np.float64]
    prefill_tokens_R: NDArray[np.float64]
    prefill_pairs_R: NDArray[np.float64]
    prefill_prefix_R: NDArray[np.float64]
    queries: int = 1
    mode: DispatchMode = "low_latency"
    micro_batches: Literal[1, 2] = 1
    rounds: int = 1

    @property
    def num_ranks(self) -> int:
        return len(self.decode_sequences_R)

    @property
    def tokens_R(self) -> NDArray[np.float64]:
        """Rows that pass through the layers, per rank."""
        return self.decode_sequences_R * self.queries + self.prefill_tokens_R


def decode_step(
    ranks: int,
    sequences: ArrayLike,
    context: ArrayLike,
    *,
    queries: int = 1,
    mode: DispatchMode = "low_latency",
    micro_batches: Literal[1, 2] = 1,
) -> StepShape:
    """A step of decode only: `sequences` a rank of mean `context` tokens each (numbers, or arrays [R])."""
    count = np.broadcast_to(np.asarray(sequences, np.float64), (ranks,))
    zero = np.zeros(ranks)
    return StepShape(
        decode_sequences_R=count,
        decode_context_R=count * np.asarray(context, np.float64),
        prefill_tokens_R=zero,
        prefill_pairs_R=zero,
        prefill_prefix_R=zero,
        queries=queries,
        mode=mode,
        micro_batches=micro_batches,
    )


def prefill_step(
    ranks: int,
    tokens: ArrayLike,
    prompt: ArrayLike,
    *,
    mode: DispatchMode = "normal",
    micro_batches: Literal[1, 2] = 1,
) -> StepShape:
    """A step of prefill only: `tokens` a rank of whole prompts of `prompt` tokens (or arrays [R])."""
    count = np.broadcast_to(np.asarray(tokens, np.float64), (ranks,))
    zero = np.zeros(ranks)
    return StepShape(
        decode_sequences_R=zero,
        decode_context_R=zero,
        prefill_tokens_R=count,
        prefill_pairs_R=count * (np.asarray(prompt, np.float64) + 1) / 2,
        prefill_prefix_R=zero,
        mode=mode,
        micro_batches=micro_batches,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of one step.

    parts          exclusive seconds on the path that decides the step; they sum to `seconds`.
                   "imbalance": what a mean rank waits because others have more tokens, longer contexts or
                   hotter experts. "dispatch" and "combine": what no computation hides, and the copy kernels.
                   "collective": all-reduces of tensor parallelism. "launch": starts of kernels, host work
    bounds         the same seconds by what limits them
    communication  seconds the links are busy, hidden or not
    exposed        seconds of communication that no computation hides
    ideal          seconds of a mean rank's roofline, see `roofline`; 0: not known
    """

    seconds: float
    parts: dict[Part, float]
    bounds: dict[Bound, float]
    communication: float
    exposed: float
    ideal: float = 0.0

    @property
    def bound(self) -> Bound:
        """What limits most of the step."""
        return max(self.bounds, key=self.bounds.__getitem__)

    def plus(self, other: "StepCost") -> "StepCost":
        """Both, one after the other."""
        return StepCost(
            seconds=self.seconds + other.seconds,
            parts={k: v + other.parts[k] for k, v in self.parts.items()},
            bounds={k: v + other.bounds[k] for k, v in self.bounds.items()},
            communication=self.communication + other.communication,
            exposed=self.exposed + other.exposed,
            ideal=self.ideal + other.ideal,
        )

    def times(self, factor: float) -> "StepCost":
        """`factor` such steps."""
        return StepCost(
            seconds=self.seconds * factor,
            parts={k: v * factor for k, v in self.parts.items()},
            bounds={k: v * factor for k, v in self.bounds.items()},
            communication=self.communication * factor,
            exposed=self.exposed * factor,
            ideal=self.ideal * factor,
        )
