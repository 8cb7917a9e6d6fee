"""Step agreement: every rank offers a proposal, every rank computes the same decision.

Pure: no clock, no torch, no process group. A proposal travels as one int64 vector of fixed
size; `agree` is a function of the proposals alone, so nothing that changes which collectives
run, or with what sizes, may come from anywhere else. R ranks.

Vector: version | flags | decode tokens | prefill tokens | in flight | placement epoch |
        membership epoch | overlap gain | chunk tokens | held steps | move |
        membership bits, ceil(R / 64) words
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import sub
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_runtime.spec.limits import DispatchMode

VERSION = 4
FIXED_WORDS = 11
_STOP, _MOVE_FAILED = 1, 2
_WORD = (1 << 64) - 1


def vector_words(num_ranks: int) -> int:
    """Length of a proposal vector."""
    return FIXED_WORDS + -(-num_ranks // 64)


class MovePhase(IntEnum):
    """How far a rank is with moving experts: it may begin, it is at it, all that it waits for is staged."""

    READY = 0
    STAGING = 1
    STAGED = 2


@dataclass(frozen=True, slots=True)
class MoveOffer:
    """Where a rank stands with the unit of moves number `ticket`; 0: nothing is to move."""

    ticket: int = 0
    phase: MovePhase = MovePhase.READY
    failed: bool = False


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """What all ranks do with experts on the move, before the step's forward pass.

    begin, commit  the unit of moves to stage, or to put in place; 0: none
    abort          drop what is staged; the placement stays as it is
    moving         some rank has moves before it, so nobody sleeps
    """

    begin: int = 0
    commit: int = 0
    abort: bool = False
    moving: bool = False


NO_OFFER, NO_ORDER = MoveOffer(), MoveOrder()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProposal:
    """What one rank offers for the next step.

    decode_tokens   rows of sequences that decode: all of them run
    prefill_tokens  prompt tokens that could run at once
    in_flight       steps launched and not yet committed (pipeline depth 1)
    stop            this rank was told to shut down and has nothing left to do
    alive           the ranks that this one counts on, and in `membership_epoch` how often that has changed:
                    always all of them so far, as an instance ends with the first of its ranks (PeerLost)
    overlap_gain    microseconds this rank expects to save with two micro-batches; may be negative
    chunk_tokens    prefill rows after which a step would take too long, as far as this rank can tell;
                    None: no opinion
    held_steps      steps in a row for which prefill has been held back; the same on every rank
    move            where this rank stands with moving experts
    """

    decode_tokens: int
    prefill_tokens: int
    in_flight: int
    stop: bool
    placement_epoch: int
    membership_epoch: int
    alive: tuple[bool, ...]
    overlap_gain: int = 0
    chunk_tokens: int | None = None
    held_steps: int = 0
    move: MoveOffer = NO_OFFER

    def to_vector(self) -> NDArray[np.int64]:
        """int64 [vector_words(R)]."""
        words = [0] * (-(-len(self.alive) // 64))
        for rank, alive in enumerate(self.alive):
            words[rank // 64] |= int(alive) << (rank % 64)
        head = [
            VERSION,
            _STOP * self.stop + _MOVE_FAILED * self.move.failed,
            self.decode_tokens,
            self.prefill_tokens,
            self.in_flight,
            self.placement_epoch,
            self.membership_epoch,
            self.overlap_gain & _WORD,
            _WORD if self.chunk_tokens is None else self.chunk_tokens,
            self.held_steps,
            self.move.ticket << 2 | self.move.phase,
        ]
        return np.array([*head, *words], dtype=np.uint64).view(np.int64)

    @classmethod
    def from_vector(cls, vector: NDArray[np.int64], num_ranks: int) -> "StepProposal":
        """Inverse of `to_vector`; raises ValueError when the peer speaks another version."""
        v = [int(w) for w in vector.view(np.uint64)]
        if v[0] != VERSION:
            raise ValueError(f"step proposal of version {v[0]}, this rank speaks {VERSION}")
        words = v[FIXED_WORDS:]
        return cls(
            decode_tokens=v[2],
            prefill_tokens=v[3],
            in_flight=v[4],
            stop=bool(v[1] & _STOP),
            placement_epoch=v[5],
            membership_epoch=v[6],
            alive=tuple(bool(words[r // 64] >> (r % 64) & 1) for r in range(num_ranks)),
            overlap_gain=v[7] - (1 << 64) if v[7] >> 63 else v[7],
            chunk_tokens=None if v[8] == _WORD else v[8],
            held_steps=v[9],
            move=MoveOffer(v[10] >> 2, MovePhase(v[10] & 3), bool(v[1] & _MOVE_FAILED)),
        )


class StepKind(IntEnum):
    """`FORWARD`: run a step. `FLUSH`: only commit what is in flight. `PARK`: block. `STOP`: end."""

    FORWARD = 0
    FLUSH = 1
    PARK = 2
    STOP = 3


MicroBatches = Literal["per_step"] | int


class OverlapReason(IntEnum):
    """Why a step ran as one or two micro-batches; the numbers stand in step records."""

    OFF = 0
    ASKED = 1
    GAIN = 2
    NO_GAIN = 3
    TOO_SMALL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreeLimits:
    """What `agree` needs of the plan; the same on every rank of an instance.

    dispatch_max_tokens  rows a rank sends in one dispatch round, whatever the mode
    prefill_delay_steps  steps for which prefill may wait, while others decode, until every rank has some
    """

    max_batch_tokens: int
    chunk_tokens: int
    dispatch_max_tokens: int
    dispatch_mode: DispatchMode | Literal["per_step"] = "normal"
    micro_batches: MicroBatches = 1
    prefill_delay_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What all ranks do next.

    token_level    a rank takes all its decode tokens, then prefill up to this many tokens
    chunk_tokens   and at most so many of prefill
    held           prefill waits for ranks that have none, so that they prefill together
    decode_rows    of the rank that has most of them; `prefill_rows` likewise
    rows           of all ranks together
    fill           `rows` / (ranks x rows of the fullest): what lock-step makes of the step
    decode_only    no rank has prefill rows: decides the order of stages of two micro-batches
    dispatch_mode  the plan's; per step: low_latency if every rank is decode-only and one round carries it
    rounds         dispatch rounds of each MoE layer, of at most `round_tokens` rows per rank
    micro_batches  1 or 2, and why
    move           what to do with experts on the move before anything else
    alive          ranks that every rank counts on
    """

    kind: StepKind
    token_level: int = 0
    chunk_tokens: int = 0
    held: bool = False
    decode_rows: int = 0
    prefill_rows: int = 0
    rows: int = 0
    fill: float = 1.0
    decode_only: bool = False
    dispatch_mode: DispatchMode = "normal"
    rounds: int = 1
    round_tokens: int = 0
    micro_batches: int = 1
    overlap_reason: OverlapReason = OverlapReason.OFF
    placement_epoch: int = 0
    move: MoveOrder = NO_ORDER
    alive: tuple[bool, ...] = ()


def step_tokens(proposal: StepProposal, level: int, chunk_tokens: int) -> int:
    """Rows a rank runs at this token level."""
    room = max(0, level - proposal.decode_tokens)
    return proposal.decode_tokens + min(proposal.prefill_tokens, room, chunk_tokens)


def agree(proposals: Sequence[StepProposal], limits: AgreeLimits) -> StepDecision:
    """The decision that follows from the proposals of all ranks, in their order."""
    alive = _alive(proposals)
    # Placements change by agreement alone, so all ranks have the same.
    epoch, move = min(p.placement_epoch for p in proposals), _move(proposals)
    decode_R = [p.decode_tokens for p in proposals]
    prefill_R = [p.prefill_tokens for p in proposals]
    if not any(decode_R) and not any(prefill_R):
        kind = StepKind.PARK
        if any(p.in_flight for p in proposals):
            kind = StepKind.FLUSH
        elif all(p.stop for p in proposals):
            kind = StepKind.STOP
        return StepDecision(kind=kind, placement_epoch=epoch, move=move, alive=alive)

    # Lock-step costs the slowest rank, so every rank may fill up to what the fullest one needs.
    held = _hold(proposals, limits)
    chunk = (
        0
        if held
        else min([limits.chunk_tokens, *(p.chunk_tokens for p in proposals if p.chunk_tokens is not None)])
    )
    most_decode = max(decode_R)
    level = min(limits.max_batch_tokens, most_decode + chunk)
    rows = [step_tokens(p, level, chunk) if p.prefill_tokens else p.decode_tokens for p in proposals]
    largest = max(rows)
    micro_batches, reason = _overlap(proposals, largest, limits)
    per_micro_batch = -(-largest // micro_batches)
    rounds = max(1, -(-per_micro_batch // limits.dispatch_max_tokens))
    decode_only = held or not any(prefill_R)
    return StepDecision(
        kind=StepKind.FORWARD,
        token_level=level,
        chunk_tokens=chunk,
        held=held,
        decode_rows=most_decode,
        prefill_rows=max(map(sub, rows, decode_R)),
        rows=sum(rows),
        fill=sum(rows) / (len(rows) * largest) if largest else 1.0,
        decode_only=decode_only,
        dispatch_mode=_dispatch_mode(limits, fits=decode_only and rounds == 1),
        rounds=rounds,
        round_tokens=limits.dispatch_max_tokens,
        micro_batches=micro_batches,
        overlap_reason=reason,
        placement_epoch=epoch,
        move=move,
        alive=alive,
    )


def _alive(proposals: Sequence[StepProposal]) -> tuple[bool, ...]:
    """Ranks that all know to be alive; as a rule all say the same, which is quickly seen."""
    first = proposals[0].alive
    if all(p.alive is first or p.alive == first for p in proposals):
        return first
    return tuple(all(flags) for flags in zip(*(p.alive for p in proposals), strict=True))


def _move(proposals: Sequence[StepProposal]) -> MoveOrder:
    """All ranks begin, or commit, the same unit in the same step; one that has failed stops all."""
    offer = proposals[0].move
    alike = all(p.move is offer or p.move == offer for p in proposals)
    if alike and offer == NO_OFFER:
        return NO_ORDER
    if any(p.move.failed for p in proposals):
        return MoveOrder(abort=True)
    if not alike:
        return MoveOrder(moving=True)
    return MoveOrder(
        begin=offer.ticket if offer.phase is MovePhase.READY else 0,
        commit=offer.ticket if offer.phase is MovePhase.STAGED else 0,
        moving=True,
    )


def _hold(proposals: Sequence[StepProposal], limits: AgreeLimits) -> bool:
    """Prefill of some ranks makes the others' tokens wait for it: let it wait for more of it, for a while."""
    ready = sum(p.prefill_tokens > 0 for p in proposals)
    decoding = any(p.decode_tokens for p in proposals)
    return 0 < ready < len(proposals) and decoding and proposals[0].held_steps < limits.prefill_delay_steps


def _dispatch_mode(limits: AgreeLimits, *, fits: bool) -> DispatchMode:
    if limits.dispatch_mode == "per_step":
        return "low_latency" if fits else "normal"
    return limits.dispatch_mode


def _overlap(
    proposals: Sequence[StepProposal], largest: int, limits: AgreeLimits
) -> tuple[int, OverlapReason]:
    """All ranks split or none does: an idle rank runs two empty micro-batches."""
    if limits.micro_batches == 1:
        return 1, OverlapReason.OFF
    if largest < 2:
        return 1, OverlapReason.TOO_SMALL
    if limits.micro_batches == 2:
        return 2, OverlapReason.ASKED
    if sum(p.overlap_gain for p in proposals) > 0:
        return 2, OverlapReason.GAIN
    return 1, OverlapReason.NO_GAIN
