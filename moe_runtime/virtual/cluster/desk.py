"""Desk: the frontend and the ranks' desks of a virtual cluster: admission, routing, handoff, ends.

Follows every request from its arrival to its end, as frontend.fleet and engine.desk do; messages take no
time. Where KV is meanwhile is for `handovers` to know.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from moe_runtime.errors import RequestRefused
from moe_runtime.frontend.admission import Admission
from moe_runtime.frontend.router import Router
from moe_runtime.scheduler.counted import CountedScheduler
from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.scheduler.step import TokenEvent
from moe_runtime.spec.requests import FinishReason, Request
from moe_runtime.virtual.cluster.clock import Clock, Kind
from moe_runtime.virtual.cluster.handovers import Handovers
from moe_runtime.virtual.cluster.instance import Instance
from moe_runtime.virtual.cluster.network import RankName
from moe_runtime.virtual.cluster.records import Listener, RequestEnd
from moe_runtime.virtual.cluster.requests import Requests, VirtualRequest, make_virtual_sequence


@dataclass(slots=True, eq=False)
class Track:
    """A request that is under way. `routes`: role -> (index of its target, tokens that count there)."""

    request: Request
    arrival: float
    routes: dict[str, tuple[int, int]]
    rank: int | None = None
    sequence: Sequence | None = None
    place: RankName | None = None
    first: float | None = None
    second: float | None = None
    cached: int = 0
    prefill_instance: str | None = None
    decode_instance: str | None = None


class Desk:
    """Who hears of clients and of instances. `admission` None: everything is let in."""

    def __init__(
        self,
        instances: Mapping[str, Instance],
        *,
        routers: Mapping[str, Router],
        handovers: Handovers,
        clock: Clock,
        listener: Listener,
        admission: Admission | None,
    ) -> None:
        self._instances, self.routers, self._handovers = instances, routers, handovers
        self._clock, self._listener, self._admission = clock, listener, admission
        self._entry = "unified" if "unified" in routers else "prefill"
        self._requests = Requests()
        self._tracks: dict[int, Track] = {}

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return len(self._tracks)

    # -- clients ------------------------------------------------------------------------------

    def arrive(self, virtual: VirtualRequest) -> None:
        """A client sends a request."""
        request = self._requests.request(virtual)
        track = Track(request, self._clock.now, {}, virtual.rank)
        self._tracks[request.id] = track
        if not self._admit(track):
            return
        try:
            for role in self.routers if request.sampling.max_tokens > 1 else (self._entry,):
                self._assign(track, role)
        except RequestRefused as refusal:
            self._end(track, FinishReason.ERROR, str(refusal))
            return
        track.sequence = make_virtual_sequence(request, handoff=self._entry == "prefill")
        track.prefill_instance, _ = track.place = self._target(track, self._entry)
        self._submit(track)

    def _admit(self, track: Track) -> bool:
        if self._admission is None:
            return True
        now, request = self._clock.now, track.request
        verdict = self._admission.offer(
            request.id,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            now=now,
        )
        for victim in verdict.displaced:
            self._abort(self._tracks[victim], "displaced by a more urgent request")
        if not verdict.admitted:
            self._end(track, FinishReason.ERROR, verdict.reason)
            return False
        if self._admission.limits.timeout is not None:
            expire = partial(self._expire, request.id)
            self._clock.at(now + self._admission.limits.timeout, Kind.OUTSIDE, expire)
        return True

    def _expire(self, request: int) -> None:
        track = self._tracks.get(request)
        if track is not None:
            self._abort(track, "the request took longer than its timeout")

    def _abort(self, track: Track, reason: str) -> None:
        """End a request wherever it is."""
        assert track.place is not None
        instance, rank = track.place
        output, last = self._output(track)
        self._instances[instance].post(rank, partial(self._drop, track))
        self._end(track, FinishReason.ERROR, reason, output=output, last=last)

    def _drop(self, track: Track, scheduler: CountedScheduler) -> None:
        scheduler.abort(track.request.id)
        self._handovers.give_up(track.request.id)

    # -- what instances say -------------------------------------------------------------------

    def token(self, instance: str, rank: int, event: TokenEvent) -> None:
        """A sequence ended, left, or its prefill is complete."""
        track = self._tracks.get(event.sequence.request.id)
        if track is None:  # aborted meanwhile
            if event.kind == "handoff":
                self._handovers.let_go(self._handovers.grant((instance, rank), event))
            return
        now, sequence = self._clock.now, event.sequence
        if track.first is None:
            self._first(track, sequence)
        elif track.second is None and sequence.num_known >= sequence.prompt_len + 2:
            track.second = now
        if event.kind == "finished":
            output = sequence.num_known - sequence.prompt_len
            self._end(track, FinishReason.LENGTH, None, output=output, last=now)
        elif event.kind == "handoff":
            self._hand_over(track, event)

    def second_token(self, sequence: Sequence, time: float) -> None:
        """A sequence gets its second token at `time`."""
        track = self._tracks.get(sequence.request.id)
        if track is not None and track.second is None:
            track.second = time

    def fetch(self, instance: str, rank: int, sequence: Sequence) -> None:
        """The sequence has blocks: its KV may come."""
        self._handovers.fetch(instance, rank, sequence)

    # -- from prefill to decode ---------------------------------------------------------------

    def _first(self, track: Track, sequence: Sequence) -> None:
        track.first = self._clock.now
        track.cached = sequence.cached_tokens
        if self._admission is not None:
            self._admission.started(track.request.id, self._clock.now)

    def _hand_over(self, track: Track, event: TokenEvent) -> None:
        """The first token is here: the sequence goes on where it is decoded."""
        assert track.place is not None
        source = self._handovers.grant(track.place, event)
        self._unassign(track, "prefill")
        if "decode" not in track.routes:
            try:
                self._assign(track, "decode")
            except RequestRefused as refusal:
                self._handovers.let_go(source)
                self._end(track, FinishReason.ERROR, str(refusal), output=1, last=self._clock.now)
                return
        track.sequence = make_virtual_sequence(track.request, transferred=True)
        track.decode_instance, _ = track.place = self._target(track, "decode")
        self._handovers.expect(track.request.id, source, track.decode_instance)
        self._submit(track)

    def _submit(self, track: Track) -> None:
        """Queue the track's sequence at its place."""
        assert track.place is not None
        instance, rank = track.place

        def message(scheduler: CountedScheduler) -> None:
            if self._tracks.get(track.request.id) is not track:
                return  # aborted on the way
            assert track.sequence is not None
            try:
                scheduler.add(track.sequence)
            except RequestRefused as refusal:
                self._handovers.give_up(track.request.id)
                role = instance.rpartition("-")[0]
                output, last = self._output(track)
                self._end(track, FinishReason.ERROR, f"{role}: {refusal}", output=output, last=last)

        self._instances[instance].post(rank, message)

    # -- failures and ends --------------------------------------------------------------------

    def fail(self, name: str) -> None:
        """An instance dies: who is there ends; KV that was to come from there is recomputed."""
        instance = self._instances[name]
        lost = [t for t in self._tracks.values() if t.place is not None and t.place[0] == name]
        outputs = [self._output(track) for track in lost]
        instance.fail()
        self.set_down(name, down=True)
        self._handovers.fail(name)
        for track, (output, last) in zip(lost, outputs, strict=True):
            self._end(track, FinishReason.ERROR, f"{name} failed", output=output, last=last)
        for track in self._tracks.values():
            if "decode" in track.routes and self._target(track, "decode")[0] == name:
                self._unassign(track, "decode")

    def set_down(self, name: str, *, down: bool) -> None:
        """Requests go to the instance, or to none of its ranks."""
        for router in self.routers.values():
            for index, target in enumerate(router.targets):
                if target.instance == name:
                    router.set_down(index, down=down)

    def _output(self, track: Track) -> tuple[int, float | None]:
        """Tokens that a client has of a request by now, and when the last of them came."""
        now, sequence = self._clock.now, track.sequence
        if track.first is None or sequence is None or track.place is None:
            return 0, None
        instance, rank = self._instances[track.place[0]], track.place[1]
        done, ended = instance.done_steps()
        output = instance.ranks.known_tokens(rank, sequence, done) - sequence.prompt_len
        if output < 2:
            return 1, track.first
        if track.second is None or track.second > now:
            return 1, track.first
        return output, max(ended, track.second)

    def _end(
        self, track: Track, reason: str, error: str | None, *, output: int = 0, last: float | None = None
    ) -> None:
        now, request = self._clock.now, track.request
        for role in list(track.routes):
            self._unassign(track, role)
        del self._tracks[request.id]
        if self._admission is not None:
            well = output if reason == FinishReason.LENGTH else None
            self._admission.finished(request.id, now, output_tokens=well)
        second = track.second if output > 1 else None
        self._listener.request(
            RequestEnd(
                index=request.id,
                arrival=track.arrival,
                first_token=track.first if output else None,
                second_token=second,
                last_token=last,
                prompt_tokens=len(request.prompt),
                cached_tokens=track.cached,
                output_tokens=output,
                finish_reason=reason,
                error=error,
                prefill_instance=track.prefill_instance if output else None,
                decode_instance=(track.decode_instance or track.prefill_instance) if output > 1 else None,
            )
        )

    # -- routing ------------------------------------------------------------------------------

    def _assign(self, track: Track, role: str) -> None:
        request = track.request
        tokens = len(request.prompt) + (0 if role == "prefill" else request.sampling.max_tokens)
        rank = track.rank if role == self._entry else None
        index = self.routers[role].assign(tokens, prompt=request.prompt, rank=rank)
        track.routes[role] = index, tokens

    def _unassign(self, track: Track, role: str) -> None:
        if role in track.routes:
            self.routers[role].finished(*track.routes.pop(role))

    def _target(self, track: Track, role: str) -> RankName:
        target = self.routers[role].targets[track.routes[role][0]]
        return target.instance, target.rank
