"""RequestDesk: one rank's dealings with frontends and with ranks of other instances. LOCAL.

Turns messages into scheduler calls and token events into messages.
Takes no part in a step: nothing here may change which collectives run.
"""

import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from moe_runtime.engine.balancing.desk import ExpertDesk
from moe_runtime.engine.clock import StepClock
from moe_runtime.engine.extras import NOTHING, Extras, take_prompt_logprobs
from moe_runtime.engine.handovers import Handovers
from moe_runtime.engine.identity import Identity
from moe_runtime.engine.messages import (
    FRONTEND_SHIFT,
    Abort,
    Collect,
    Full,
    Goodbye,
    Hello,
    Prefilled,
    PromptDone,
    Ready,
    Refused,
    Release,
    Renew,
    Reserve,
    Reserved,
    Start,
    Stats,
    Status,
    StepTokens,
    Submit,
    SubmitTransferred,
    ToFrontend,
    Token,
    ToRank,
    Wake,
    Watch,
)
from moe_runtime.engine.promises import Promises
from moe_runtime.engine.sockets import Inbox, Outbox
from moe_runtime.engine.structures import Structures
from moe_runtime.engine.tally import Tally
from moe_runtime.engine.watchers import Watchers
from moe_runtime.errors import RequestRefused, UnavailableError
from moe_runtime.report.records import StepLog, pack
from moe_runtime.report.timeline import RankTimeline
from moe_runtime.scheduler.constraint import Constraint
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import make_sequence
from moe_runtime.scheduler.step import TokenEvent


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request whose output must look like something that is not compiled yet."""

    message: Submit | SubmitTransferred
    constraint: "Future[Constraint]"


@dataclass(slots=True)
class RequestDesk:
    """What frontends, and ranks of other instances, want of this rank and hear of it."""

    identity: Identity
    inbox: "Inbox[ToRank]"
    outbox: Outbox
    scheduler: Scheduler
    log: StepLog
    clock: StepClock
    eos_token_ids: tuple[int, ...]
    handovers: Handovers
    structures: Structures
    promises: Promises
    tally: Tally
    experts: ExpertDesk
    stopping: bool = False
    wake_step: int = -1
    changed: bool = False
    _frontends: dict[int, str] = field(default_factory=dict)
    _left: dict[int, str | None] = field(default_factory=dict)
    _compiling: list[_Compiling] = field(default_factory=list)
    _watchers: Watchers = field(default_factory=Watchers)
    _arrived: dict[int, float] = field(default_factory=dict)
    _starts: dict[int, Start] = field(default_factory=dict)

    def receive(self) -> None:
        """Handle every message that is there, pulls that ended and leases that are over."""
        for message in self.inbox.drain():
            self._handle(message)
        self._poll_compiling()
        now = time.monotonic()
        self.changed |= self.handovers.poll(now)
        for frontend, answer in self.experts.poll(now):
            self._tell(frontend, answer)
        self.changed |= self.experts.busy
        if self._watchers:
            self._report(now)

    @property
    def watched(self) -> bool:
        """A frontend follows this rank by its statuses: it serves without end, so keeps no log of steps."""
        return bool(self._watchers)

    def after_propose(self) -> None:
        """Note who was admitted just now, and begin to fetch the KV of those prefilled elsewhere."""
        for sequence in self.scheduler.take_admitted():
            now = time.monotonic()
            waited = now - self._arrived.pop(sequence.request.id, now)
            if not sequence.transferred:
                self._starts[sequence.request.id] = Start(sequence.cached_tokens, waited)
        self.handovers.start_pulls()

    @property
    def has_work(self) -> bool:
        """There is something that a step could run or should learn of."""
        running = self.scheduler.table.ready.any()
        return bool(running) or bool(self.scheduler.waiting) or self.idle_stop or self.experts.busy

    @property
    def idle_stop(self) -> bool:
        """Told to stop, and nothing is left to do."""
        busy = self.scheduler.num_requests or self.handovers.busy or self._compiling
        return self.stopping and not busy

    def patience(self) -> float:
        """Seconds this rank may sleep before it must look again by itself."""
        if self._compiling:
            return 0.001
        now = time.monotonic()
        limit = min(self.experts.patience, self._watchers.patience(now), self.handovers.patience(now))
        return max(0.001, limit)

    def wake_peers(self, step: int) -> None:
        """Tell the other ranks of the instance that this one goes on to `step`."""
        for rank in range(self.identity.num_ranks):
            if rank != self.identity.rank:
                self.outbox.send(self.identity.addresses[self.identity.instance, rank], Wake(step=step))

    def deliver(self, events: list[TokenEvent], extras: dict[int, Extras]) -> None:
        """Send a step's tokens; `extras[sample]` is what a sample's client wanted beside them."""
        tokens: dict[int, list[Token]] = defaultdict(list)
        for event in events:
            request = event.sequence.request.id
            frontend = request >> FRONTEND_SHIFT
            extra = extras.get(event.sample, NOTHING)
            start = self._starts.pop(request, None)
            if start is not None:
                start = structs.replace(start, prompt_logprobs=take_prompt_logprobs(event.sequence))
            if event.kind != "token":
                self.promises.end(request)
            if event.kind == "prompt":
                instance = self.identity.instance
                self._tell(frontend, PromptDone(request=request, instance=instance, start=start))
                continue
            if event.kind == "handoff":
                prefilled = Prefilled(
                    handoff=self.handovers.grant(event),
                    logits=extra.logits,
                    logprobs=extra.logprobs,
                    start=start,
                )
                self._tell(frontend, prefilled)
                continue
            tokens[frontend].append(
                Token(request, event.token, event.finish_reason, extra.logits, extra.logprobs, start)
            )
        self.tally.output_tokens += sum(event.kind != "prompt" for event in events)
        for frontend, batch in tokens.items():
            self._tell(
                frontend, StepTokens(instance=self.identity.instance, rank=self.identity.rank, tokens=batch)
            )

    def close(self) -> None:
        """Close the sockets once what was sent to other instances is out, and the transfer thread."""
        self.inbox.close()
        peers = [a for (i, _), a in self.identity.addresses.items() if i == self.identity.instance]
        self.outbox.close(unwanted={*peers, *filter(None, self._left.values())})
        self.structures.close()
        self.experts.close()
        self.handovers.close()

    # -- inside -------------------------------------------------------------------------------

    def _handle(self, message: ToRank) -> None:
        self.changed = True
        match message:
            case Submit() | SubmitTransferred():
                self._take(message)
            case Reserve(request=request_id, tokens=tokens):
                if self._promise(request_id, tokens):
                    self._tell(request_id >> FRONTEND_SHIFT, Reserved(request=request_id))
            case Abort(request=request_id):
                self._abort(request_id)
            case Release(lease=lease):
                self.handovers.release(lease)
            case Renew(lease=lease):
                self.handovers.leases.renew(lease, time.monotonic())
            case Wake(step=step):
                self.wake_step = max(self.wake_step, step)
            case Hello(frontend=frontend, address=address):
                self._frontends[frontend] = address
                me = self.identity
                self._tell(frontend, Ready(instance=me.instance, rank=me.rank))
            case Collect():
                self._send_stats()
            case Watch(frontend=frontend, seconds=seconds):
                self._watchers.watch(frontend, seconds)
            case Goodbye(frontend=frontend, frontends=frontends):
                self._watchers.watch(frontend, 0.0)
                self._left[frontend] = self._frontends.pop(frontend, None)
                self.stopping = len(self._left) >= frontends
            case _:
                for frontend, answer in self.experts.handle(message):
                    self._tell(frontend, answer)

    def _take(self, message: Submit | SubmitTransferred) -> None:
        """A request came: see to its constraint, then queue it."""
        request = message.request
        tokens = len(request.prompt) + request.sampling.max_tokens
        if isinstance(message, Submit):
            tokens = len(request.prompt) if message.handoff else tokens
            if message.bounded and not self._promise(request.id, tokens):
                return
        else:
            self.handovers.expect(request.id, message.handoff.source)
        self.promises.add(request.id, tokens)
        self._arrived[request.id] = time.monotonic()
        if request.sampling.structure is None:
            self._admit(message, None)
        else:
            self._compiling.append(_Compiling(message, self.structures.start(request.sampling.structure)))

    def _promise(self, request_id: int, tokens: int) -> bool:
        """Promise to serve a request, or tell its frontend that there is no room."""
        leased = self.handovers.leased_tokens
        if self.promises.fits(tokens, held=leased):
            self.promises.add(request_id, tokens)
            return True
        me, promises = self.identity, self.promises
        full = Full(
            request=request_id,
            instance=me.instance,
            rank=me.rank,
            tokens=promises.tokens + leased,
            requests=promises.requests,
        )
        self._tell(request_id >> FRONTEND_SHIFT, full)
        return False

    def _admit(self, message: Submit | SubmitTransferred, constraint: Constraint | None) -> None:
        """Queue a request at the scheduler, or refuse it."""
        make = partial(make_sequence, message.request, self.eos_token_ids, constraint=constraint)
        match message:
            case Submit(handoff=handoff):
                sequence = make(handoff=handoff)
            case SubmitTransferred(handoff=handoff):
                sequence = make(first_token=handoff.first_token)
        try:
            self.scheduler.add(sequence)
        except RequestRefused as refusal:
            self._refuse(message.request.id, str(refusal))

    def _refuse(self, request_id: int, reason: str) -> None:
        self._arrived.pop(request_id, None)
        self.promises.end(request_id)
        self.handovers.give_up(request_id)
        me = self.identity
        refused = Refused(request=request_id, instance=me.instance, reason=f"{me.deployment}: {reason}")
        self._tell(request_id >> FRONTEND_SHIFT, refused)

    def _poll_compiling(self) -> None:
        for waiting in [w for w in self._compiling if w.constraint.done()]:
            self._compiling.remove(waiting)
            self.changed = True
            try:
                constraint = waiting.constraint.result()
            except (RequestRefused, UnavailableError) as refusal:
                self._refuse(waiting.message.request.id, str(refusal))
                continue
            self._admit(waiting.message, constraint)

    def _abort(self, request_id: int) -> None:
        self._arrived.pop(request_id, None)
        self._starts.pop(request_id, None)
        self.promises.end(request_id)
        self._compiling = [w for w in self._compiling if w.message.request.id != request_id]
        self.scheduler.abort(request_id)
        self.handovers.end_request(request_id)

    def _send_stats(self) -> None:
        me, batch = self.identity, pack(self.log.take())
        timeline = RankTimeline(instance=me.instance, rank=me.rank, spans=self.clock.take_spans())
        stats = Stats(instance=me.instance, rank=me.rank, batch=batch, timeline=timeline)
        for frontend in self._frontends:
            self._tell(frontend, stats)

    def _report(self, now: float) -> None:
        """Send the frontends that are due how this rank is doing."""
        scheduler = self.scheduler
        load = (
            len(scheduler.waiting),
            scheduler.table.num_running,
            self.handovers.num_pulls,
            self.promises.requests,
        )
        for frontend in self._watchers.due(now, load):
            others_tokens, others_requests = self.promises.besides(frontend, FRONTEND_SHIFT)
            status = Status(
                instance=self.identity.instance,
                deployment=self.identity.deployment,
                rank=self.identity.rank,
                time=now,
                step=self.clock.step,
                waiting=len(scheduler.waiting),
                waiting_tokens=sum(s.num_known for s in scheduler.waiting),
                running=scheduler.table.num_running,
                pulling=self.handovers.num_pulls,
                kv_blocks=scheduler.pool.total,
                kv_used=scheduler.pool.num_used,
                kv_cached=scheduler.pool.num_idle,
                block_tokens=scheduler.limits.block_tokens,
                others_tokens=others_tokens,
                others_requests=others_requests,
                chunk_tokens=self.tally.chunk_tokens,
                totals=self.tally.totals(),
                balancing=self.experts.status(now),
            )
            self._tell(frontend, status)

    def _tell(self, frontend: int, message: "ToFrontend") -> None:
        if frontend in self._left:
            return
        address = self._frontends.get(frontend)
        assert address is not None, f"frontend {frontend} never said hello"
        self.outbox.send(address, message)
