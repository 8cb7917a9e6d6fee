"""What a virtual cluster tells whoever listens (steps, ends of requests), and its instances the desk.

Pure data. Times are virtual seconds from the start of the simulation. R ranks of an instance. Long runs
have millions of steps and of tokens, so nothing here is per token, and steps in which nothing changed but
contexts come as one record.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.agree import StepDecision
from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.scheduler.step import TokenEvent
from moe_runtime.virtual.cost.shapes import StepCost

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """`steps` steps of one instance, one after the other without a pause, of the same rows on every rank.

    start, seconds  when the first began; how long all of them took together
    decision        as agreed for each of them
    decode_R        decode rows of one step; the others are of the whole run (a run with prefill is one step)
    prefill_R       prompt tokens computed for the first time
    cached_R        prompt tokens found in the prefix cache by sequences admitted before the step
    recomputed_R    prefill rows run again after a preemption
    preemptions_R   sequences preempted
    kv_used_R       blocks in use after the last step, those of sequences that end with it among them
    cost            of all the steps together
    """

    instance: str
    first_step: int
    steps: int
    start: float
    seconds: float
    decision: StepDecision
    decode_R: I64
    prefill_R: I64
    cached_R: I64
    recomputed_R: I64
    preemptions_R: I64
    kv_used_R: I64
    cost: StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """A request that is over, as its client saw it; None: that did not happen.

    index           line of the trace, from 0
    arrival         when the trace wanted it sent
    first_token, second_token, last_token  when they arrived; between the second and the last token the gaps
                    are the steps of its decode instance
    finish_reason   length, or error (refused, shed, aborted), and why
    """

    index: int
    arrival: float
    first_token: float | None
    second_token: float | None
    last_token: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    error: str | None
    prefill_instance: str | None
    decode_instance: str | None


class Listener(Protocol):
    """Hears everything in the order of virtual time, of one instance at least."""

    def steps(self, run: StepRun) -> None: ...

    def request(self, end: RequestEnd) -> None: ...


class Desk(Protocol):
    """Who hears what an instance has to say, at the moment it happens."""

    def fetch(self, instance: str, rank: int, sequence: Sequence) -> None:
        """The sequence has blocks: its KV may come."""
        ...

    def token(self, instance: str, rank: int, event: TokenEvent) -> None:
        """A sequence ended, left, or its prefill is complete."""
        ...

    def second_token(self, sequence: Sequence, time: float) -> None:
        """A sequence gets its second token at `time`."""
        ...
