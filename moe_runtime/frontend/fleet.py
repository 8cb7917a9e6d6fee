"""Fleet: the frontend's side of all ranks. Submits requests, follows them through prefill and
decode, and keeps what came back. Knows no HTTP, no traces, no torch.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from moe_runtime.engine.messages import (
    FRONTEND_SHIFT,
    Abort,
    Collect,
    Hello,
    Prefilled,
    Ready,
    Refused,
    Shutdown,
    Stats,
    StepTokens,
    Submit,
    SubmitTransferred,
    ToFrontend,
    Token,
)
from moe_runtime.engine.sockets import Outbox
from moe_runtime.frontend.router import Router, Target
from moe_runtime.report.records import RankSteps, unpack
from moe_runtime.report.timeline import RankTimeline
from moe_runtime.spec.requests import FinishReason, Request, SamplingParams


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank listens, and what it is."""

    instance: str
    deployment: str
    rank: int
    address: str


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend is told when it starts."""

    frontend: int
    address: str
    ranks: list[RankAddress]


@dataclass(slots=True, eq=False)
class Live:
    """A request on its way: times are seconds of time.monotonic()."""

    request: Request
    sent: float
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logits: bytes | None = None
    finish_reason: str | None = None
    error: str | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    route: tuple[str, int, int] | None = None


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
            role: Router([Target(r.instance, r.rank) for r in bootstrap.ranks if r.deployment == role])
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

    async def start(self, on_wait: Callable[[list[str]], None] | None = None) -> None:
        """Say hello to every rank and wait until all are ready; `on_wait` hears who is missing."""
        self._inbox.bind(self._bootstrap.address)
        self._reader = asyncio.create_task(self._read())
        for address in self._addresses.values():
            self._outbox.send(
                address, Hello(frontend=self._bootstrap.frontend, address=self._bootstrap.address)
            )
        while missing := [f"{i} rank {r}" for i, r in self._addresses if (i, r) not in self._ready]:
            if not await self._wait_changed(5.0) and on_wait is not None:
                on_wait(missing)

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Live:
        """Send a request to the least loaded rank; await `live.done` for its end."""
        request = Request(id=self._next, prompt=prompt, sampling=sampling)
        self._next += 1
        live = Live(request, sent=time.monotonic())
        self._live[request.id] = live
        target = self._assign(live, self._entry, self._load(live))
        self._outbox.send(self._address(target), Submit(request=request, handoff=self._entry == "prefill"))
        live.prefill_instance = target.instance
        return live

    def abort(self, live: Live) -> None:
        """Stop a request wherever it is; its `done` is set at once."""
        if live.request.id in self._live:
            if live.route is not None:
                role, index, _ = live.route
                address = self._address(self._routers[role].targets[index])
                self._outbox.send(address, Abort(request=live.request.id))
            self._finish(live, FinishReason.ABORT)

    async def collect(self) -> list[RankSteps]:
        """The steps recorded by every rank since the last call; traces are added to `timelines`."""
        self._steps.clear()
        for address in self._addresses.values():
            self._outbox.send(address, Collect())
        while len(self._steps) < len(self._addresses):
            await self._wait_changed(5.0)
        return [self._steps[key] for key in self._addresses]

    def raise_if_failed(self) -> None:
        """Raise what ended the reader, if anything did: answers after that are no answers."""
        if self._reader is not None and self._reader.done():
            self._reader.result()

    async def shutdown(self) -> None:
        """Tell every rank to finish and stop; close the sockets."""
        for address in self._addresses.values():
            self._outbox.send(address, Shutdown())
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._inbox.close(linger=0)
        self._outbox.close()
        self._context.term()

    # -- inside -------------------------------------------------------------------------------

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
            case Prefilled(handoff=handoff, logits=logits):
                live = self._live.get(handoff.request)
                if live is None:  # aborted meanwhile: let its KV go
                    source = handoff.source
                    address = self._addresses[source.instance, source.rank]
                    self._outbox.send(address, Abort(request=handoff.request))
                    return
                self._append(live, handoff.first_token, now, logits)
                target = self._assign(live, "decode", self._load(live))
                live.decode_instance = target.instance
                self._outbox.send(
                    self._address(target), SubmitTransferred(request=live.request, handoff=handoff)
                )
            case Refused(request=request, reason=reason):
                if (live := self._live.get(request)) is not None:
                    self._finish(live, FinishReason.ERROR, reason)
            case Ready(instance=instance, rank=rank):
                self._ready.add((instance, rank))
            case Stats(instance=instance, rank=rank, batch=batch, timeline=timeline):
                self._steps[instance, rank] = unpack(batch)
                self.timelines.append(timeline)

    def _token(self, token: Token, instance: str, now: float) -> None:
        live = self._live.get(token.request)
        if live is None:
            return
        self._append(live, token.token, now, token.logits)
        live.decode_instance = instance
        if token.finish_reason is not None:
            self._finish(live, token.finish_reason)

    def _append(self, live: Live, token: int, now: float, logits: bytes | None) -> None:
        live.token_ids.append(token)
        live.token_times.append(now)
        if logits is not None:
            live.logits = logits

    def _finish(self, live: Live, reason: str, error: str | None = None) -> None:
        self._unassign(live)
        del self._live[live.request.id]
        live.finish_reason, live.error = reason, error
        live.done.set()

    def _load(self, live: Live) -> int:
        return len(live.request.prompt) + live.request.sampling.max_tokens

    def _assign(self, live: Live, role: str, tokens: int) -> Target:
        self._unassign(live)
        index = self._routers[role].assign(tokens)
        live.route = (role, index, tokens)
        return self._routers[role].targets[index]

    def _unassign(self, live: Live) -> None:
        if live.route is not None:
            role, index, tokens = live.route
            self._routers[role].finished(index, tokens)
            live.route = None

    def _address(self, target: Target) -> str:
        return self._addresses[target.instance, target.rank]
