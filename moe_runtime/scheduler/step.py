"""What a rank's scheduler is bounded by, offers, builds and reports, step by step: plain data."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.scheduler.step_inputs import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """One rank's numbers from the plan.

    attention_span  context at which a prefill row counts twice (`budget.row_cost`); 0: all count alike
    prefix_cache  KV blocks of finished sequences are found again by later ones with the same beginning
    prefix_tokens tokens hashed and found as a whole, a multiple of `block_tokens`; 0: `block_tokens`
    reuse_pulled  what is found so of a sequence that was prefilled elsewhere need not be fetched
    model         tells apart models whose KV must not be mixed up
    """

    max_batch_tokens: int
    max_sequences: int
    chunk_tokens: int
    block_tokens: int
    num_blocks: int
    max_positions: int
    attention_span: int = 0
    prefix_cache: bool = True
    prefix_tokens: int = 0
    reuse_pulled: bool = False
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What this rank could run in the next step."""

    decode_tokens: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A built step: what the device runs, and whose samples come back.

    `prefill_tokens` are computed for the first time, `recomputed_tokens` again after a preemption;
    `cached_tokens` are prompt tokens that sequences admitted since the last step need not compute;
    `scored` are the sequences of `inputs.score_rows_S`, with the number of rows of each.
    """

    inputs: StepInputs
    sampled: tuple[Sequence, ...]
    prefill_tokens: int
    recomputed_tokens: int
    cached_tokens: int
    scored: tuple[tuple[Sequence, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """A sequence got a token. `kind` handoff: it leaves for a decode instance with `blocks`; prompt: it
    wanted none, and its prompt is through.
    """

    sequence: Sequence
    sample: int
    token: int
    kind: Literal["token", "finished", "handoff", "prompt"]
    finish_reason: str | None = None
    blocks: NDArray[np.int32] | None = None
