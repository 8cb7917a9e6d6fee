"""Fleet: the frontend's side of all ranks. Submits requests, follows them through prefill and
decode, and keeps what came back. Knows no HTTP, no traces, no torch.
"""

import asyncio
import time
from collections.abc import Callable

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
    Full,
    Goodbye,
    Hello,
    Prefilled,
    PromptDone,
    Ready,
    Refused,
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
    Watch,
)
from moe_runtime.engine.sockets import Outbox
from moe_runtime.errors import NoRoom, RequestRefused
from moe_runtime.frontend.bootstrap import Bootstrap
from moe_runtime.frontend.live import Live, Route
from moe_runtime.frontend.peers import PeerAnswer, PeerAsk, PeerMessage, Peers
from moe_runtime.frontend.routes import Routes
from moe_runtime.report.records import RankSteps, unpack
from moe_runtime.report.timeline import RankTimeline
from moe_runtime.spec.requests import FinishReason, Request, SamplingParams


class Fleet:
    """All ranks of a launch, as one frontend sees them. Use as: start, submit..., collect, shutdown.

    `bounded`: ranks may turn requests away that they have no room for, as a server's clients can ask
    again; otherwise everything waits until there is room.
    """

    def __init__(self, bootstrap: Bootstrap, *, bounded: bool = False) -> None:
        self._bootstrap = bootstrap
        self._bounded = bounded
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._outbox = Outbox(zmq.Context.shadow(self._context.underlying))
        self._addresses = {(r.instance, r.rank): r.address for r in bootstrap.ranks}
        self._decoder = msgspec.msgpack.Decoder(ToFrontend | PeerMessage)
        self._routes = Routes(bootstrap.ranks, bounded=bounded)
        others = [n for n in range(len(bootstrap.peers)) if n != bootstrap.frontend]
        self.peers = Peers(bootstrap.frontend, others, self._tell_peer)
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
        requests, instead of the router's choice. Raises RequestRefused if no rank can be chosen, NoRoom
        if all of them are known to be full; a rank that turns out to be sends it to the next one.
        """
        request = Request(
            id=self.new_id() if request_id is None else request_id,
            prompt=prompt,
            sampling=sampling,
            priority=priority,
            cache_salt=cache_salt,
        )
        live = Live(request, sent=time.monotonic(), rank=rank, bounded=self._bounded)
        if notify is not None:
            live.notify = notify
        self._live[request.id] = live
        try:
            roles = [self._routes.entry]
            if self._routes.entry == "prefill" and sampling.max_tokens > 1:
                roles.append("decode")
            for role in roles:
                self._routes.assign(live, role)
            for role in roles:
                self._tell(live, role)
        except RequestRefused:
            self._leave(live)
            raise
        return live

    def abort(self, live: Live, reason: str = FinishReason.ABORT, error: str | None = None) -> None:
        """Stop a request wherever it is; its end is known at once. Harmless when it has ended."""
        if live.request.id in self._live:
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

    def _tell_peer(self, number: int, message: PeerMessage) -> None:
        self._outbox.send(self._bootstrap.peers[number], message)

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

    def _handle(self, message: ToFrontend | PeerMessage, now: float) -> None:
        match message:
            case StepTokens(instance=instance, tokens=tokens):
                for token in tokens:
                    self._token(token, instance, now)
            case Prefilled(handoff=handoff):
                self._prefilled(message, self._live.get(handoff.request), now)
            case PromptDone(request=request, instance=instance, start=start):
                if (live := self._live.get(request)) is not None:
                    _begin(live, start)
                    self._finish(live, FinishReason.LENGTH, ended_at=instance)
            case Refused(request=request, instance=instance, reason=reason):
                if (live := self._live.get(request)) is not None:
                    live.refused = True
                    self._finish(live, FinishReason.ERROR, reason, ended_at=instance)
            case Reserved(request=request):
                if (live := self._live.get(request)) is not None:
                    live.reserved = True
                    self._go_on(live)
            case Full(request=request):
                self._turned_away(message, self._live.get(request))
            case Status():
                self._routes.observe(message)
                if self._on_status is not None:
                    self._on_status(message, now)
            case Ready(instance=instance, rank=rank):
                self._ready.add((instance, rank))
            case Stats(instance=instance, rank=rank, batch=batch, timeline=timeline):
                self._steps[instance, rank] = unpack(batch)
                self.timelines.append(timeline)
            case PeerAsk() | PeerAnswer():
                self.peers.handle(message)
            case PlacementNow() | RecordedLoads() | ReloadAnswer():
                if self.on_experts is not None:
                    self.on_experts(message)

    def _tell(self, live: Live, role: str) -> None:
        """Tell the rank where the request has a place, unless it will only hear of it later."""
        request, route = live.request, live.routes[role]
        message: msgspec.Struct
        if role != "decode":
            message = Submit(request=request, handoff=role == "prefill", bounded=live.bounded)
            live.prefill_instance = route.target.instance
        elif live.bounded:
            message = Reserve(request=request.id, tokens=route.tokens)
        else:
            return
        self._send(route, message)

    def _send(self, route: Route, message: msgspec.Struct) -> None:
        self._outbox.send(self._addresses[route.target.instance, route.target.rank], message)
        route.told = True

    def _turned_away(self, message: Full, live: Live | None) -> None:
        """A rank has no room for a request: ask the next one, or give up."""
        role = self._routes.turned_away(live, message)
        if live is None:
            return
        try:
            self._routes.assign(live, role)
            self._tell(live, role)
        except RequestRefused as refusal:
            live.no_room = isinstance(refusal, NoRoom)
            self._finish(live, FinishReason.ERROR, str(refusal))

    def _prefilled(self, message: Prefilled, live: Live | None, now: float) -> None:
        """The first token is here: go on where the sequence is decoded, once there is a place."""
        handoff = message.handoff
        if live is None:  # aborted meanwhile
            source = handoff.source
            self._outbox.send(self._addresses[source.instance, source.rank], Abort(request=handoff.request))
            return
        self._append(live, handoff.first_token, now, message)
        live.handoff = handoff
        self._go_on(live)

    def _go_on(self, live: Live) -> None:
        """Hand a request over to the rank that decodes it, if its prompt has run and its place is sure."""
        if live.handoff is None or (live.bounded and not live.reserved):
            return
        route = live.routes["decode"]
        self._routes.leave(live, "prefill")
        live.decode_instance = route.target.instance
        self._send(route, SubmitTransferred(request=live.request, handoff=live.handoff))
        live.handoff = None
        live.notify()

    def _token(self, token: Token, instance: str, now: float) -> None:
        live = self._live.get(token.request)
        if live is None:
            return
        self._append(live, token.token, now, token)
        live.decode_instance = instance
        if token.finish_reason is not None:
            self._finish(live, token.finish_reason, ended_at=instance)
        else:
            live.notify()

    def _append(self, live: Live, token: int, now: float, source: Token | Prefilled) -> None:
        if not live.token_ids:
            _begin(live, source.start)
        live.token_ids.append(token)
        live.token_times.append(now)
        if source.logits is not None:
            live.logits = source.logits
        if source.logprobs is not None:
            live.logprobs.append(source.logprobs)

    def _finish(
        self, live: Live, reason: str, error: str | None = None, *, ended_at: str | None = None
    ) -> None:
        """End a request; ranks that know of it are told, but for the instance where it ended by itself."""
        self._leave(live, ended_at)
        live.finish_reason, live.error = reason, error
        live.done.set()
        live.notify()

    def _leave(self, live: Live, ended_at: str | None = None) -> None:
        for role, route in list(live.routes.items()):
            if route.told and route.target.instance != ended_at:
                self._send(route, Abort(request=live.request.id))
            self._routes.leave(live, role)
        del self._live[live.request.id]


def _begin(live: Live, start: Start | None) -> None:
    """Note how the prompt of a request went."""
    if start is not None:
        live.cached_tokens = start.cached_tokens
        live.queue_seconds = start.queue_seconds
        live.prompt_logprobs = start.prompt_logprobs
