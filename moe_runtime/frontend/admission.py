"""Admission: which requests a frontend lets in, and what it tells those it does not.

Pure: no sockets, no clock (`now` is an argument, seconds of any monotonic clock). Knows requests by
id and length only. A request is *waiting* from its admission to its first token, then *running*.

An open system that queues without bound answers everybody too late. Here a request is refused at
once when it would have to wait longer than is useful, so what is let in still meets its objective.
"""

import heapq
from dataclasses import dataclass
from enum import IntEnum

from moe_runtime.frontend.busy_rate import BusyRate

# What is expected errs, the more the less there is to learn from: so much of the objective may be used up.
PLANNED_SHARE = 0.8
LONGEST_RETRY = 60.0
_OUTPUT_WEIGHT = 0.05


class Answer(IntEnum):
    """The HTTP status that a verdict becomes."""

    ADMIT = 200
    NEVER = 400
    LATER = 429
    UNAVAILABLE = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to an offer.

    reason       for the client, empty when admitted
    retry_after  seconds after which asking again is worth while; 0 when it is not, or not needed
    displaced    admitted, still waiting requests of a worse priority that make room: abort them with 429
    """

    status: Answer
    reason: str = ""
    retry_after: float = 0.0
    displaced: tuple[int, ...] = ()

    @property
    def admitted(self) -> bool:
        return self.status is Answer.ADMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What one frontend may let in; tokens are prompt and requested output together.

    longest            tokens of the longest sequence that a rank could ever finish
    longest_prompt     tokens of the longest prompt that a rank could ever prefill
    running_requests   sequences that all ranks run at once
    running_tokens     tokens that the KV caches of all ranks hold
    queue_requests     requests that may wait beyond those
    queue_tokens       tokens that may wait beyond those
    max_wait           seconds a new request may expect to wait until its prompt is run
    max_first_token    seconds to its first token that it may expect, if it has to wait at all
    prompt_ranks       ranks that run prompts
    timeout            seconds from arrival to the last token, if the request names none; None: no limit
    """

    longest: int
    longest_prompt: int
    running_requests: int
    running_tokens: int
    queue_requests: int
    queue_tokens: int
    max_wait: float
    max_first_token: float = float("inf")
    prompt_ranks: int = 1
    timeout: float | None = None


def derive_limits(
    *,
    decode_ranks: int,
    rank_kv_tokens: int,
    rank_sequences: int,
    prefill_kv_tokens: int,
    max_positions: int,
    ttft_seconds: float,
    prompt_ranks: int = 1,
    timeout: float | None = None,
) -> AdmissionLimits:
    """Limits that follow from the KV capacity of the ranks that decode.

    Each of several frontends may use all of it: which of them a client meets is chance, and ranks promise
    no more than they have room for.

    `prefill_kv_tokens` is what one prefill rank caches (a unified rank: the same as `rank_kv_tokens`).
    As much as runs may wait once more. What bounds the queue in practice is that a request may expect to
    wait for half of the objective, and to have its first token within `PLANNED_SHARE` of it.
    """
    running_requests = decode_ranks * rank_sequences
    running_tokens = decode_ranks * rank_kv_tokens
    return AdmissionLimits(
        longest=min(max_positions, rank_kv_tokens),
        longest_prompt=min(max_positions, prefill_kv_tokens),
        running_requests=running_requests,
        running_tokens=running_tokens,
        queue_requests=running_requests,
        queue_tokens=running_tokens,
        prompt_ranks=prompt_ranks,
        max_wait=ttft_seconds / 2,
        max_first_token=PLANNED_SHARE * ttft_seconds,
        timeout=timeout,
    )


@dataclass(slots=True)
class _Entry:
    prompt: int
    max_tokens: int
    priority: int
    order: int
    arrived: float
    deadline: float
    waiting: bool = True

    @property
    def tokens(self) -> int:
        return self.prompt + self.max_tokens


class Admission:
    """The requests that one frontend has let in and not seen the end of."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.draining = False
        self.missing: tuple[str, ...] = ()
        self._entries: dict[int, _Entry] = {}
        self._order = 0
        self._rate = BusyRate(limits.prompt_ranks)
        self._mean_output: float | None = None

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        return self._rate.waiting

    @property
    def tokens(self) -> int:
        """Prompt and requested output tokens of everything let in."""
        return sum(e.tokens for e in self._entries.values())

    def offer(
        self,
        request: int,
        *,
        prompt_tokens: int,
        max_tokens: int,
        now: float,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Verdict:
        """Let a request in or say why not. `priority`: lower is served first.

        An admitted request stays on the books until `finished`. `timeout` seconds from now is its
        deadline; None takes the limits' own.
        """
        assert request not in self._entries, f"request {request} was offered twice"
        never = self._never(prompt_tokens, max_tokens)
        if never:
            return Verdict(status=Answer.NEVER, reason=never)
        closed = self._closed()
        if closed is not None:
            return closed
        timeout = self.limits.timeout if timeout is None else timeout
        entry = _Entry(
            prompt_tokens,
            max_tokens,
            priority,
            self._order,
            now,
            float("inf") if timeout is None else now + timeout,
        )
        wait = self.expected_wait(priority, now)
        late = self._lateness(entry, wait, timeout, now)
        if late > 0:
            return _too_late(wait, late)
        displaced = self._make_room(entry)
        if displaced is None:
            return Verdict(
                status=Answer.LATER,
                reason=f"the queue is full: {self.num_requests} requests, {self.tokens} tokens",
                retry_after=_retry(max(wait, 1.0)),
            )
        for victim in displaced:
            self._remove(victim, now)
        self._rate.arrive(now)
        self._entries[request] = entry
        self._order += 1
        return Verdict(status=Answer.ADMIT, displaced=displaced)

    def never_together(self, requests: int, tokens: int) -> str:
        """Why so many outputs at once are not let in even where nothing else runs; empty if they are."""
        limits = self.limits
        most_requests = limits.running_requests + limits.queue_requests
        most_tokens = limits.running_tokens + limits.queue_tokens
        if requests > most_requests:
            return f"{requests} outputs at once, at most {most_requests} are let in"
        if tokens > most_tokens:
            return f"{requests} outputs take {tokens} tokens, at most {most_tokens} are let in"
        return ""

    def hopeless(self, priority: int, now: float) -> Verdict | None:
        """What every request of this priority would be told now, however short; None: that depends on it.

        Spares the work of finding out how long it is.
        """
        closed = self._closed()
        if closed is not None:
            return closed
        wait = self.expected_wait(priority, now)
        return _too_late(wait, wait - self.limits.max_wait) if wait > self.limits.max_wait else None

    def started(self, request: int, now: float) -> None:
        """The first token of a request is here; unknown ids are ignored (it may have been aborted)."""
        entry = self._entries.get(request)
        if entry is None or not entry.waiting:
            return
        entry.waiting = False
        self._rate.start(now, self._cost(entry))

    def finished(self, request: int, now: float, *, output_tokens: int | None = None) -> None:
        """A request ended, for whatever reason; `output_tokens` of those that ended well."""
        if output_tokens is not None:
            mean = output_tokens if self._mean_output is None else self._mean_output
            self._mean_output = mean + _OUTPUT_WEIGHT * (output_tokens - mean)
        self._remove(request, now)

    def expired(self, now: float) -> list[int]:
        """Requests whose deadline has passed: abort them. They stay on the books until `finished`."""
        return [i for i, e in self._entries.items() if e.deadline <= now]

    def next_deadline(self) -> float | None:
        """When `expired` has to be asked again."""
        first = min((e.deadline for e in self._entries.values()), default=float("inf"))
        return None if first == float("inf") else first

    def expected_wait(self, priority: int, now: float) -> float:
        """Seconds until a rank would turn to a request that came now.

        That rank is the one with the least work ahead, if what waits is dealt out in order. Work is done
        at the rate of busy ranks: a capacity, not the load that happened to be there. Where nothing was
        measured yet, a request may expect what others have waited already.
        """
        ahead = sorted(
            (e.priority, e.order, self._cost(e), e.arrived)
            for e in self._entries.values()
            if e.waiting and e.priority <= priority
        )
        ranks = [0.0] * self.limits.prompt_ranks
        for _, _, cost, _ in ahead:
            heapq.heapreplace(ranks, ranks[0] + cost)
        if not ranks[0]:
            return 0.0
        rate = self._rate.per_second(now) / len(ranks)
        return ranks[0] / rate if rate > 0 else now - min(arrived for *_, arrived in ahead)

    # -- inside -------------------------------------------------------------------------------

    def _lateness(self, entry: _Entry, wait: float, timeout: float | None, now: float) -> float:
        """Seconds by which a request that waits so long would miss what it may expect; 0 if it does not.

        One that need not wait is never late: it cannot be served sooner at another time.
        """
        if not wait:
            return 0.0
        limit = float("inf") if timeout is None else timeout
        rate = self._rate.per_second(now) / self.limits.prompt_ranks
        own = self._cost(entry) / rate if rate > 0 else 0.0
        return max(
            wait - min(self.limits.max_wait, limit), wait + own - min(self.limits.max_first_token, limit)
        )

    def _closed(self) -> Verdict | None:
        if self.draining:
            return Verdict(status=Answer.UNAVAILABLE, reason="the server is shutting down", retry_after=5.0)
        if self.missing:
            return Verdict(
                status=Answer.UNAVAILABLE, reason=f"not ready: {', '.join(self.missing)}", retry_after=2.0
            )
        return None

    def _never(self, prompt_tokens: int, max_tokens: int) -> str:
        limits = self.limits
        if prompt_tokens > limits.longest_prompt:
            return f"the prompt has {prompt_tokens} tokens, at most {limits.longest_prompt} fit"
        if prompt_tokens + max_tokens > limits.longest:
            return (
                f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} are"
                f" {prompt_tokens + max_tokens}, at most {limits.longest} fit"
            )
        return ""

    def _make_room(self, entry: _Entry) -> tuple[int, ...] | None:
        """Waiting requests to displace so that `entry` fits, the worst and newest first; None: no way."""
        limits = self.limits
        requests = self.num_requests + 1 - limits.running_requests - limits.queue_requests
        tokens = self.tokens + entry.tokens - limits.running_tokens - limits.queue_tokens
        worse = [(i, e) for i, e in self._entries.items() if e.waiting and e.priority > entry.priority]
        worse.sort(key=lambda pair: (-pair[1].priority, -pair[1].order))
        victims = []
        for i, e in worse:
            if requests <= 0 and tokens <= 0:
                break
            victims.append(i)
            requests -= 1
            tokens -= e.tokens
        return tuple(victims) if requests <= 0 and tokens <= 0 else None

    def _remove(self, request: int, now: float) -> None:
        entry = self._entries.pop(request, None)
        if entry is not None and entry.waiting:
            self._rate.leave(now)

    def _cost(self, entry: _Entry) -> float:
        """Tokens a request really takes: few use the whole of their max_tokens."""
        mean = self._mean_output
        return entry.prompt + (entry.max_tokens if mean is None else min(entry.max_tokens, mean))


def _too_late(wait: float, late: float) -> Verdict:
    return Verdict(
        status=Answer.LATER,
        reason=f"overloaded: {wait:.1f} s of work are ahead, the first token would come too late",
        retry_after=_retry(late),
    )


def _retry(seconds: float) -> float:
    return min(LONGEST_RETRY, max(1.0, seconds))
