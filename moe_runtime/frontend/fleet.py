"""Fleet: the frontend's side of all ranks. Submits requests, follows them through prefill and
decode, and keeps what came back. Knows no HTTP, no traces, no torch.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio

from moe_runtime.engine.balancing.wire import (
    PlacementNow,
    RecordedLoads,
    ReloadAnswer,
    ToFrontendBalancing,
)
from moe_runtime.engine.messages import (
    FRONTEND_SHIFT,
    Abort,
    Collect,
    Goodbye,
    Hello,
    Prefilled,
    Ready,
    Refused,
    Stats,
    Status,
    StepTokens,
    Submit,
    SubmitTransferred,
    ToFrontend,
    Token,
    Watch,
)
from moe_runtime.engine.sockets import Outbox
from moe_runtime.errors import RequestRefused
from moe_runtime.frontend.bootstrap import Bootstrap, RankAddress
from moe_runtime.frontend.live import Live
from moe_runtime.frontend.router import AFFINITY_TOKENS, Router, Target
from moe_runtime.report.records import RankSteps, unpack
from moe_runtime.report.timeline import RankTimeline
from moe_runtime.spec.requests import FinishReason, Request, SamplingParams


class Fleet:
    """All ranks of a launch, as one frontend sees them. Use as: start, submit..., collect, shutdown."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._outbox = Outbox(zmq.Context.shadow(self._context.underlying))
        self._addresses = {(r.instance, r.rank): r.address for r in bootstrap.ranks}
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self._routers = {
            role: _router([r for r in bootstrap.ranks if r.deployment == role])
            for role in dict.fromkeys(r.deployment for r in bootstrap.ranks)
        }
        self._entry = "unified" if "unified" in self._routers else "prefill"
        self._live: dict[int, Live] = {}
        self._ready: set[tuple[str, int]] = set()
        self._steps: dict[tuple[str, int], RankSteps] = {}
        self.timelines: list[RankTimeline] = []
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._next = bootstrap.frontend << FRONTEND_SHIFT
        self._on_status: Callable[[Status, float], None] | None = None
        self.on_experts: Callable[[ToFrontendBalancing], None] | None = None

    async def start(self, on_wait: Callable[[list[str]], None] | None = None) -> None:
        """Say hello to every rank and wait until all are ready; `on_wait` hears who is missing."""
        self._inbox.bind(self._bootstrap.address)
        self._reader = asyncio.create_task(self._read())
        hello = Hello(frontend=self._bootstrap.frontend, address=self._bootstrap.address)
        self._tell_all(hello)
        while missing := self.missing:
            if not await self._wait_changed(5.0) and on_wait is not None:
                on_wait(missing)

    @property
    def missing(self) -> list[str]:
        """Names of the ranks that have not said that they are ready."""
        return [f"{i} rank {r}" for i, r in self._addresses if (i, r) not in self._ready]

    @property
    def number(self) -> int:
        """Which of the frontends this is."""
        return self._bootstrap.frontend

    @property
    def ranks(self) -> list[tuple[str, int]]:
        """(instance, rank) of every rank."""
        return list(self._addresses)

    def watch(self, seconds: float, on_status: Callable[[Status, float], None]) -> None:
        """Have every rank report how it is doing every so often; `on_status` hears it and the time."""
        self._on_status = on_status
        self._tell_all(Watch(frontend=self._bootstrap.frontend, seconds=seconds))

    def tell(self, rank: tuple[str, int], message: msgspec.Struct) -> None:
        """Send a message to one of `ranks`."""
        self._outbox.send(self._addresses[rank], message)

    def new_id(self) -> int:
        """An id that no other request of the launch has."""
        self._next += 1
        return self._next

    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        request_id: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        notify: Callable[[], None] | None = None,
    ) -> Live:
        """Send a request to a rank; await `live.done` for its end, or be notified of every token.

        `priority`: lower is served first. `rank`: the index of the rank among those that take new
        requests, instead of the router's choice. Raises RequestRefused if no rank can be chosen.
        """
        request = Request(
            id=self.new_id() if request_id is None else request_id,
            prompt=prompt,
            sampling=sampling,
            priority=priority,
            cache_salt=cache_salt,
        )
        live = Live(request, sent=time.monotonic())
        if notify is not None:
            live.notify = notify
        target = self._assign(live, self._entry, rank)
        self._live[request.id] = live
        self._outbox.send(self._address(target), Submit(request=request, handoff=self._entry == "prefill"))
        live.prefill_instance = target.instance
        return live

    def abort(self, live: Live, reason: str = FinishReason.ABORT, error: str | None = None) -> None:
        """Stop a request wherever it is; its end is known at once. Harmless when it has ended."""
        if live.request.id in self._live:
            if live.route is not None:
                role, index, _ = live.route
                address = self._address(self._routers[role].targets[index])
                self._outbox.send(address, Abort(request=live.request.id))
            self._finish(live, reason, error)

    async def collect(self) -> list[RankSteps]:
        """The steps recorded by every rank since the last call; traces are added to `timelines`."""
        self._steps.clear()
        self._tell_all(Collect())
        while len(self._steps) < len(self._addresses):
            await self._wait_changed(5.0)
        return [self._steps[key] for key in self._addresses]

    def raise_if_failed(self) -> None:
        """Raise what ended the reader, if anything did: answers after that are no answers."""
        if self._reader is not None and self._reader.done():
            self._reader.result()

    async def until_failure(self) -> None:
        """Wait for what ends the reader of a fleet that was started, and raise it."""
        assert self._reader is not None
        await asyncio.shield(self._reader)

    async def shutdown(self) -> None:
        """Leave; close the sockets. The ranks finish and stop when the last frontend has left."""
        self._tell_all(Goodbye(frontend=self._bootstrap.frontend, frontends=self._bootstrap.frontends))
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._inbox.close(linger=0)
        self._outbox.close()
        self._context.term()

    # -- inside -------------------------------------------------------------------------------

    def _tell_all(self, message: msgspec.Struct) -> None:
        for address in self._addresses.values():
            self._outbox.send(address, message)

    async def _read(self) -> None:
        try:
            while True:
                raw = await self._inbox.recv()
                self._handle(self._decoder.decode(raw), time.monotonic())
                self._changed.set()
        finally:
            # Whatever ends the reader, nobody may wait for an answer that cannot come.
            for live in list(self._live.values()):
                self._finish(live, FinishReason.ERROR, "the frontend stopped reading")

    async def _wait_changed(self, seconds: float) -> bool:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            self.raise_if_failed()
            return False
        return True

    def _handle(self, message: ToFrontend, now: float) -> None:
        match message:
            case StepTokens(instance=instance, tokens=tokens):
                for token in tokens:
                    self._token(token, instance, now)
            case Prefilled(handoff=handoff):
                self._prefilled(message, self._live.get(handoff.request), now)
            case Refused(request=request, reason=reason):
                if (live := self._live.get(request)) is not None:
                    live.refused = True
                    self._finish(live, FinishReason.ERROR, reason)
            case Status():
                self._status(message, now)
            case Ready(instance=instance, rank=rank):
                self._ready.add((instance, rank))
            case Stats(instance=instance, rank=rank, batch=batch, timeline=timeline):
                self._steps[instance, rank] = unpack(batch)
                self.timelines.append(timeline)
            case PlacementNow() | RecordedLoads() | ReloadAnswer():
                if self.on_experts is not None:
                    self.on_experts(message)

    def _prefilled(self, message: Prefilled, live: Live | None, now: float) -> None:
        """The first token is here: go on where the sequence is decoded."""
        handoff = message.handoff
        if live is None:  # aborted meanwhile
            self._release(message)
            return
        self._append(live, handoff.first_token, now, message)
        try:
            target = self._assign(live, "decode")
        except RequestRefused as refusal:
            self._release(message)
            self._finish(live, FinishReason.ERROR, str(refusal))
            return
        live.decode_instance = target.instance
        self._outbox.send(self._address(target), SubmitTransferred(request=live.request, handoff=handoff))
        live.notify()

    def _release(self, message: Prefilled) -> None:
        """Nobody decodes this: let its KV go."""
        source = message.handoff.source
        address = self._addresses[source.instance, source.rank]
        self._outbox.send(address, Abort(request=message.handoff.request))

    def _token(self, token: Token, instance: str, now: float) -> None:
        live = self._live.get(token.request)
        if live is None:
            return
        self._append(live, token.token, now, token)
        live.decode_instance = instance
        if token.finish_reason is not None:
            self._finish(live, token.finish_reason)
        else:
            live.notify()

    def _append(self, live: Live, token: int, now: float, source: Token | Prefilled) -> None:
        live.token_ids.append(token)
        live.token_times.append(now)
        if source.logits is not None:
            live.logits = source.logits
        if source.logprobs is not None:
            live.logprobs.append(source.logprobs)
        if source.start is not None and len(live.token_ids) == 1:
            live.cached_tokens = source.start.cached_tokens
            live.queue_seconds = source.start.queue_seconds

    def _status(self, status: Status, now: float) -> None:
        router = self._routers[status.deployment]
        with suppress(ValueError):
            index = router.targets.index(Target(status.instance, status.rank))
            router.observe(index, others_tokens=status.others_tokens)
        if self._on_status is not None:
            self._on_status(status, now)

    def _finish(self, live: Live, reason: str, error: str | None = None) -> None:
        self._unassign(live)
        del self._live[live.request.id]
        live.finish_reason, live.error = reason, error
        live.done.set()
        live.notify()

    def _assign(self, live: Live, role: str, rank: int | None = None) -> Target:
        """Choose a target of a role; what was counted for the request elsewhere is counted here."""
        self._unassign(live)
        request = live.request
        tokens = len(request.prompt) + (0 if role == "prefill" else request.sampling.max_tokens)
        router = self._routers[role]
        index = router.assign(tokens, prompt=request.prompt, rank=rank)
        live.route = (role, index, tokens)
        return router.targets[index]

    def _unassign(self, live: Live) -> None:
        if live.route is not None:
            role, index, tokens = live.route
            self._routers[role].finished(index, tokens)
            live.route = None

    def _address(self, target: Target) -> str:
        return self._addresses[target.instance, target.rank]


def _router(ranks: list[RankAddress]) -> Router:
    """The router of one role; the smallest cache of its ranks is what all are taken to have.

    Where prompts come with their KV, who has seen a prefix before does not matter.
    """
    return Router(
        [Target(r.instance, r.rank) for r in ranks],
        kv_tokens=min(r.kv_tokens for r in ranks),
        affinity_tokens=0 if ranks[0].deployment == "decode" else AFFINITY_TOKENS,
    )
