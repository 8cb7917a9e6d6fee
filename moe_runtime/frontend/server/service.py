"""Service: what a server does with a request once its form is understood.

Asks admission, sends outputs to the ranks, watches deadlines, counts, and ends everything that a
client left behind. Knows nothing of HTTP; the ranks are behind `Backend`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_runtime.errors import NoRoom, RequestRefused
from moe_runtime.frontend.admission import Admission, Answer, Verdict
from moe_runtime.frontend.board import STALE_SECONDS
from moe_runtime.frontend.live import Live
from moe_runtime.frontend.metrics import Metrics
from moe_runtime.frontend.openai.choices import NO_ROOM_SECONDS, Choice, News
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.text.output import TextOutput
from moe_runtime.frontend.text.vocabulary import Vocabulary
from moe_runtime.spec.requests import FinishReason, SamplingParams

SILENT_SECONDS = 30.0
_LONGEST_SLEEP = 0.25


class Backend(Protocol):
    """The ranks, as a server needs them (`frontend.fleet.Fleet`)."""

    @property
    def missing(self) -> list[str]:
        """Names of ranks that are not ready."""

    def new_id(self) -> int:
        """An id for `submit`."""

    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        request_id: int,
        priority: int,
        cache_salt: str,
        rank: int | None,
        notify: Callable[[], None],
    ) -> Live:
        """Send a request; RequestRefused if no rank can be chosen, NoRoom if all of them are full."""

    def abort(self, live: Live, reason: str = ..., error: str | None = ...) -> None:
        """Stop a request; harmless when it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One output that is asked for."""

    prompt: list[int]
    sampling: SamplingParams
    stop: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request is served. `name`: what its client calls it. `timeout`: seconds; None: the server's."""

    name: str
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    rank: int | None = None


class Service:
    """All requests of one frontend."""

    def __init__(
        self,
        backend: Backend,
        *,
        vocabulary: Vocabulary,
        admission: Admission,
        metrics: Metrics,
        timeout: float,
        ranks_per_node: int,
    ) -> None:
        self.backend = backend
        self.vocabulary = vocabulary
        self.admission = admission
        self.metrics = metrics
        self.timeout = timeout
        self.ranks_per_node = ranks_per_node
        self._running: set[Running] = set()
        self._choices: dict[int, Running] = {}
        self._ready_since: float | None = None

    @property
    def num_requests(self) -> int:
        """Requests of clients that have not ended."""
        return len(self._running)

    def not_ready(self) -> list[str]:
        """Names of the ranks that are not ready yet."""
        if self._ready_since is not None:
            return []
        missing = self.backend.missing
        if not missing:
            self._ready_since = time.monotonic()
        return missing

    def silent(self, now: float) -> list[str]:
        """Names of the ranks, once all were ready, that have not reported for `SILENT_SECONDS`.

        A rank reports between steps, and one step may take long where the machine is slow.
        """
        if self.not_ready() or self._ready_since is None or now - self._ready_since < SILENT_SECONDS:
            return []
        return self.metrics.board.stale(now - SILENT_SECONDS + STALE_SECONDS)

    def require_hope(self, terms: Terms) -> None:
        """Raise ApiError 429 or 503 if no request of this priority is let in now, however short it is."""
        self.admission.missing = tuple(self.not_ready())
        verdict = self.admission.hopeless(terms.priority, time.monotonic())
        if verdict is not None:
            self.metrics.observe_verdict(verdict)
            raise _turned_away(verdict)

    def start(self, orders: Sequence[Order], terms: Terms) -> "Running":
        """Send all outputs of a request to the ranks, or none of them.

        Raises ApiError 400 for what can never be served, 429 and 503 for what cannot be now.
        """
        running = Running(self, terms)
        ids = self._admit(orders, terms)
        try:
            for request_id, order in zip(ids, orders, strict=True):
                live = self.backend.submit(
                    order.prompt,
                    order.sampling,
                    request_id=request_id,
                    priority=terms.priority,
                    cache_salt=terms.cache_salt,
                    rank=terms.rank,
                    notify=running.event.set,
                )
                text = TextOutput(self.vocabulary, order.stop, order.sampling.min_tokens)
                running.choices.append(Choice(len(running.choices), live, text))
        except RequestRefused as refusal:
            for choice in running.choices:
                self.backend.abort(choice.live)
            for request_id in ids:
                self.admission.finished(request_id, time.monotonic())
            raise _no_rank(refusal, terms) from None
        self._running.add(running)
        self._choices.update((c.live.request.id, running) for c in running.choices)
        return running

    def abort(self, name: str) -> int:
        """End every request that clients call `name`; returns how many there were."""
        found = [r for r in self._running if r.terms.name == name]
        for running in found:
            running.fail(ApiError(499, "the request was aborted", code="aborted"))
        return len(found)

    def fail_all(self, error: ApiError) -> None:
        """End every request with an error."""
        for running in list(self._running):
            running.fail(error)

    async def watch_deadlines(self) -> None:
        """End requests whose time is over, until cancelled."""
        while True:
            now = time.monotonic()
            for request_id in self.admission.expired(now):
                if (running := self._choices.get(request_id)) is not None:
                    seconds = self.timeout if running.terms.timeout is None else running.terms.timeout
                    message = f"not finished within {seconds:g} s, the time that the request has"
                    running.fail(ApiError(504, message, code="timeout"))
            next_deadline = self.admission.next_deadline()
            sleep = _LONGEST_SLEEP if next_deadline is None else min(_LONGEST_SLEEP, next_deadline - now)
            await asyncio.sleep(max(0.005, sleep))

    def forget(self, running: "Running") -> None:
        """A request has its answer or lost its client; whatever of it still runs is stopped."""
        for choice in running.choices:
            self.backend.abort(choice.live)
            self._choices.pop(choice.live.request.id, None)
        self._running.discard(running)

    # -- inside -------------------------------------------------------------------------------

    def _admit(self, orders: Sequence[Order], terms: Terms) -> list[int]:
        """Put every output on admission's books, or none and raise what it says."""
        now = time.monotonic()
        self.admission.missing = tuple(self.not_ready())
        self._require_possible(orders)
        ids: list[int] = []
        for order in orders:
            request_id = self.backend.new_id()
            verdict = self.admission.offer(
                request_id,
                prompt_tokens=len(order.prompt),
                max_tokens=order.sampling.max_tokens,
                now=now,
                priority=terms.priority,
                timeout=terms.timeout,
            )
            self.metrics.observe_verdict(verdict)
            for victim in verdict.displaced:
                self._displace(victim)
            if not verdict.admitted:
                for admitted in ids:
                    self.admission.finished(admitted, now)
                raise _turned_away(verdict)
            ids.append(request_id)
        return ids

    def _require_possible(self, orders: Sequence[Order]) -> None:
        """ApiError 400 for outputs that would be turned away together at any time."""
        tokens = sum(len(o.prompt) + o.sampling.max_tokens for o in orders)
        if reason := self.admission.never_together(len(orders), tokens):
            self.metrics.observe_verdict(Verdict(status=Answer.NEVER, reason=reason))
            raise ApiError(400, f"n: {reason}", param="n", code="too_many_outputs")

    def _displace(self, request_id: int) -> None:
        if (running := self._choices.get(request_id)) is not None:
            message = "a more urgent request took the place of this one in the queue"
            running.fail(ApiError(429, message, code="overloaded", retry_after=1.0))


def _turned_away(verdict: Verdict) -> ApiError:
    status = int(verdict.status)
    code = "context_length_exceeded" if status == 400 else "overloaded"
    return ApiError(status, verdict.reason, code=code, retry_after=verdict.retry_after)


def _no_rank(refusal: RequestRefused, terms: Terms) -> ApiError:
    if isinstance(refusal, NoRoom):
        return ApiError(429, str(refusal), code="overloaded", retry_after=NO_ROOM_SECONDS)
    return ApiError(400 if terms.rank is not None else 503, str(refusal), code="no_rank")


class Running:
    """A client's request while its outputs come. `event` is set when there may be news."""

    def __init__(self, service: Service, terms: Terms) -> None:
        self.terms = terms
        self.event = asyncio.Event()
        self.choices: list[Choice] = []
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self._service = service
        self._settled: set[int] = set()

    @property
    def ended(self) -> bool:
        """Nothing more will come: the answer is whole, or it never will be."""
        return self.failure is not None or all(c.ended for c in self.choices)

    @property
    def failure(self) -> ApiError | None:
        """Why the answer will not be whole, if it will not be."""
        return next((c.failure for c in self.choices if c.failure is not None), None)

    def fail(self, error: ApiError) -> None:
        """End every output that has not ended."""
        for choice in self.choices:
            if not choice.ended:
                choice.failure = error
                self._service.backend.abort(choice.live, FinishReason.ABORT, error.message)
        self.event.set()

    def close(self) -> None:
        """The client has its answer, or has gone: let go of everything."""
        self._service.forget(self)
        for choice in self.choices:
            self._settle(choice)

    def news(self) -> list[tuple[Choice, News]]:
        """What is new of every output."""
        found = []
        for choice in self.choices:
            news = choice.advance()
            if news is not None:
                self._count(choice, news)
                found.append((choice, news))
        return found

    def _count(self, choice: Choice, news: News) -> None:
        live, service = choice.live, self._service
        metrics, times = service.metrics, choice.live.token_times
        for position in range(news.first, news.last):
            if position:
                metrics.observe_token(gap=times[position] - times[position - 1])
            else:
                if self.first_token is None:
                    self.first_token = times[0]
                service.admission.started(live.request.id, times[0])
                metrics.observe_first_token(ttft=times[0] - self.arrived, queue=live.queue_seconds)
        if choice.ended:
            # Of a prompt alone, the end is what a first token is of others.
            if choice.finish_reason is not None and not live.request.sampling.max_tokens:
                service.admission.started(live.request.id, time.monotonic())
            service.backend.abort(live)  # after a stop string its rank still runs it
            self._settle(choice)

    def _settle(self, choice: Choice) -> None:
        """Take an output off the books, once."""
        if choice.index in self._settled:
            return
        self._settled.add(choice.index)
        live, service, now = choice.live, self._service, time.monotonic()
        whole = choice.finish_reason is not None and live.request.sampling.max_tokens > 0
        tokens = choice.num_tokens if whole else None
        service.admission.finished(live.request.id, now, output_tokens=tokens)
        failure = choice.failure.code if choice.failure is not None else None
        service.metrics.observe_finished(
            finish_reason=choice.finish_reason or failure or "gone",
            seconds=now - self.arrived,
            prompt_tokens=len(live.request.prompt),
            output_tokens=choice.num_tokens,
        )
