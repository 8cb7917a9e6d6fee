"""RankEngine: the step loop of one rank. A step reads propose -> agree -> forward -> commit.

All ranks of an instance run this loop in lock-step; whatever decides which collectives run
comes out of `agree`. With pipeline depth 1 a step is committed after the next one is launched.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moe_runtime.engine import device_step, split
from moe_runtime.engine.agree import (
    AgreeLimits,
    MoveOrder,
    StepDecision,
    StepKind,
    StepProposal,
    agree,
)
from moe_runtime.engine.balancing.agent import Balancing
from moe_runtime.engine.clock import OUTSIDE, StepClock
from moe_runtime.engine.desk import RequestDesk
from moe_runtime.engine.device_step import NO_SAMPLES, Samples
from moe_runtime.engine.exchange import Exchange
from moe_runtime.engine.extras import extras_of, keep_scores
from moe_runtime.engine.overlap_policy import OverlapModel
from moe_runtime.engine.recorder import step_row
from moe_runtime.expert_parallel.meter import TransportMeter
from moe_runtime.models.decoder import Decoder
from moe_runtime.report.records import PHASES
from moe_runtime.scheduler.budget import ChunkBudget
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.step import Scheduled

WARM_UP_TOKENS = 64
MOVING_SECONDS = 0.001  # between steps in which there is nothing to do but move experts
POISON = 1e30  # finite, so that a masked position times zero stays zero


@dataclass(slots=True)
class RankEngine:
    """One rank. `poison` overwrites freed KV (tests)."""

    desk: RequestDesk
    scheduler: Scheduler
    decoder: Decoder
    kv_cache: list[Tensor]
    exchange: Exchange
    limits: AgreeLimits
    meter: TransportMeter
    clock: StepClock
    pipeline_depth: int
    poison: bool = False
    overlap: OverlapModel = field(default_factory=OverlapModel)
    budget: ChunkBudget | None = None
    step_number: int = 0
    held_steps: int = 0
    _in_flight: deque[tuple[Scheduled, Samples]] = field(default_factory=deque)
    _previous: Samples = NO_SAMPLES

    @property
    def balancing(self) -> Balancing | None:
        """None where experts stay where they are."""
        return self.desk.experts.balancing

    @torch.inference_mode()
    def warm_up(self) -> None:
        """COLLECTIVE: run once what requests will run, before they are welcome."""
        tokens = min(self.limits.chunk_tokens, self.limits.dispatch_max_tokens - 1, WARM_UP_TOKENS)
        if tokens > 0:
            device_step.warm_up(
                self.decoder,
                self.kv_cache,
                block_tokens=self.scheduler.limits.block_tokens,
                num_tokens=min(tokens, self.scheduler.limits.max_positions - 1),
                clock=self.clock,
            )
        if self.balancing is not None:
            self.balancing.rehearse()
        self.desk.experts.load.reset()
        self.meter.take()

    @torch.inference_mode()
    def run(self) -> None:
        """COLLECTIVE: step until all ranks agree to stop."""
        while self.step() is not StepKind.STOP:
            pass

    def step(self) -> StepKind:
        """COLLECTIVE: one turn of the loop."""
        self.clock.begin(self.step_number)
        self.desk.receive()
        decision = self._agree(self._propose())
        if self.desk.experts.reload.due(decision.move):
            self._change_weights(decision.move)
            return StepKind.FLUSH
        self.desk.experts.follow(decision.move)
        if decision.kind is StepKind.FORWARD:
            scheduled = self._forward(decision)
            self._commit(leave=self.pipeline_depth)
            self._record(scheduled, decision)
        elif decision.kind is StepKind.FLUSH:
            self._commit(leave=0)
        elif decision.kind is StepKind.PARK:
            self._park(decision)
        self.step_number += 1
        return decision.kind

    def close(self) -> None:
        """LOCAL: let queued messages leave, close sockets and the transfer thread."""
        self.desk.close()

    def _propose(self) -> StepProposal:
        work = self.scheduler.propose()
        if self.poison:
            self._poison_stale()  # all blocks of a step are handed out by now, and none is written yet
        self.desk.after_propose()
        return StepProposal(
            decode_tokens=work.decode_tokens,
            prefill_tokens=work.prefill_tokens,
            in_flight=len(self._in_flight),
            stop=self.desk.idle_stop,
            placement_epoch=self.balancing.epoch if self.balancing else 0,
            membership_epoch=0,
            alive=(True,) * self.desk.identity.num_ranks,
            held_steps=self.held_steps,
            move=self.desk.experts.offer(),
            chunk_tokens=self.budget.rows(work.decode_tokens) if self.budget else None,
            overlap_gain=round(1e6 * self.overlap.gain(work.decode_tokens + work.prefill_tokens)),
        )

    def _agree(self, proposal: StepProposal) -> StepDecision:
        self.clock.enter("waiting")
        vectors = self.exchange(self.step_number, proposal.to_vector())
        self.clock.enter("other")
        proposals = [StepProposal.from_vector(v, len(vectors)) for v in vectors]
        decision = agree(proposals, self.limits)
        self.held_steps = self.held_steps + 1 if decision.held else 0
        return decision

    def _change_weights(self, order: MoveOrder) -> None:
        """A step of its own, on all ranks: nothing that the old weights computed is used after it."""
        self._commit(leave=0)
        self.scheduler.forget_kv()
        self.desk.experts.follow(order)
        self.step_number += 1

    def _forward(self, decision: StepDecision) -> Scheduled:
        scheduled = self.scheduler.build(decision.token_level, decision.chunk_tokens)
        whole = scheduled.inputs
        parts = split.halves(whole) if decision.micro_batches == 2 else (whole,)
        contexts = [
            device_step.make_context(
                part,
                decision,
                previous=self._previous,
                kv_cache=self.kv_cache,
                block_tokens=self.scheduler.limits.block_tokens,
                clock=self.clock,
            )
            for part in parts
        ]
        both = list(zip(parts, contexts, strict=True))
        self._previous = device_step.run(self.decoder, both, decode_only=decision.decode_only)
        self.clock.enter("other")
        self.clock.at(OUTSIDE, OUTSIDE)
        self._in_flight.append((scheduled, self._previous))
        return scheduled

    def _commit(self, *, leave: int) -> None:
        """Read the samples of all but the newest `leave` steps and send what they mean."""
        while len(self._in_flight) > leave:
            scheduled, samples = self._in_flight.popleft()
            tokens_N = samples.tokens_N.cpu().numpy().astype(np.int32)
            keep_scores(scheduled, samples)
            events = self.scheduler.commit(scheduled, tokens_N)
            self.desk.deliver(events, extras_of(scheduled.inputs.sampling, samples))
        self.scheduler.check_invariants(leased=self.desk.handovers.leases.num_blocks)

    def _record(self, scheduled: Scheduled, decision: StepDecision) -> None:
        """Close the step's clock, append its row, and let the overlap model learn from it."""
        totals = self.meter.take()
        wall = self.clock.end()
        busy = wall - self.clock.seconds[PHASES.index("waiting")]
        self.overlap.observe(
            tokens=scheduled.inputs.num_tokens,
            micro_batches=decision.micro_batches,
            busy=busy,
            compute=busy - totals.waited,
            transport=totals.busy,
        )
        if self.budget is not None:
            self.budget.observe(
                decode_rows=decision.decode_rows, prefill_rows=decision.prefill_rows, seconds=wall
            )
        row = step_row(scheduled, decision, totals)
        if self.balancing is not None:
            self.balancing.after_step(
                rows=decision.rows,
                received_L=row["received_rows"],
                expert_seconds=self.clock.seconds[PHASES.index("experts")],
            )
        row |= {"wall": wall, "phases": self.clock.seconds, "preemptions": self.scheduler.take_preemptions()}
        self.desk.tally.add(row, step_fill=decision.fill, chunk_tokens=decision.chunk_tokens)
        if not self.desk.watched:
            self.desk.log.append(
                step=self.step_number,
                start=self.clock.start,
                kv_used_blocks=self.scheduler.pool.num_used,
                **row,
            )

    def _park(self, decision: StepDecision) -> None:
        """Block until a message, a finished pull or a peer gives this rank something to do."""
        if decision.move.moving:  # all ranks know
            self.desk.inbox.wait(MOVING_SECONDS)
            return
        self.desk.changed = False
        while self.desk.wake_step <= self.step_number:
            if self.desk.changed and self.desk.has_work:
                self.desk.wake_peers(self.step_number + 1)
                return
            self.desk.changed = False
            self.desk.inbox.wait(self.desk.patience())
            self.desk.receive()
            self.exchange.look(self.step_number)

    def _poison_stale(self) -> None:
        stale = self.scheduler.pool.take_stale()
        if stale:
            for layer in self.kv_cache:
                layer[stale] = POISON
