"""Ranks of an instance as the launch builds them, in a World of processes, driven step by step by a test.

What a frontend does comes from the test, in the rank's own process: requests go to the rank's inbox.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
import zmq

from moe_runtime.engine import rank as rank_module
from moe_runtime.engine.agree import (
    AgreeLimits,
    MicroBatches,
    StepDecision,
    StepKind,
    StepProposal,
    agree,
)
from moe_runtime.engine.balancing.wire import ReloadAnswer
from moe_runtime.engine.collectives import Collective, CollectiveTrace
from moe_runtime.engine.messages import Abort, Hello, Refused, StepTokens, Submit, ToFrontend
from moe_runtime.engine.rank import RankEngine
from moe_runtime.engine.sockets import Inbox, Outbox, ipc_address
from moe_runtime.launch import worker
from moe_runtime.launch.place import place_of
from moe_runtime.launch.preflight import preflight
from moe_runtime.launch.sockets import inbox_address, make_session
from moe_runtime.spec.requests import Request, SamplingParams
from tests.expert_parallel.world import Rank


class Files:
    """What ranks publish for each other: files of a folder that all of them see."""

    def __init__(self, rank: Rank, name: str) -> None:
        self._rank, self._name = rank, name

    def gather(self, key: str, text: str) -> list[str]:
        """COLLECTIVE: every rank's text."""
        paths = [self._rank.folder / f"{self._name}.{key}.{r}" for r in range(self._rank.num_ranks)]
        mine = paths[self._rank.rank]
        part = mine.with_name(f"{mine.name}.part")
        part.write_text(text)
        part.rename(mine)
        deadline = time.monotonic() + 60
        while not all(p.exists() for p in paths):
            assert time.monotonic() < deadline, f"{key}: not all ranks came"
            time.sleep(0.002)
        return [p.read_text() for p in paths]


@dataclass
class Driven:
    """One rank. `tokens` and reasons of `refused` by request id, `collectives` and `reloads` in order."""

    rank: Rank
    engine: RankEngine
    collectives: list[Collective]
    session: Path
    _inbox: "Inbox[object]"
    _outbox: Outbox
    _address: str
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    decisions: list[StepDecision] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    reloads: list[str] = field(default_factory=list)

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """LOCAL: a request for this rank, greedy."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        request = Request(id=number, prompt=prompt, sampling=sampling)
        self._outbox.send(self._address, Submit(request=request, handoff=False))

    def tell(self, message: msgspec.Struct) -> None:
        """LOCAL: what a frontend says to this rank."""
        self._outbox.send(self._address, message)

    def abort(self, number: int) -> None:
        """LOCAL: drop a request."""
        self._outbox.send(self._address, Abort(request=number))

    def collect(self) -> None:
        """LOCAL: take what the rank has said."""
        for message in self._inbox.drain():
            match message:
                case StepTokens(tokens=tokens):
                    for token in tokens:
                        self.tokens.setdefault(token.request, []).append(token.token)
                        if token.logprobs is not None:
                            self.logprobs.setdefault(token.request, []).append(token.logprobs.chosen)
                        if token.finish_reason is not None:
                            self.finished[token.request] = token.finish_reason
                case Refused(request=request, reason=reason):
                    self.refused[request] = reason
                case ReloadAnswer(state=state):
                    self.reloads.append(state)

    def close(self) -> None:
        self.engine.close()
        self._inbox.close()
        self._outbox.close()
        if self.rank.rank == 0:
            shutil.rmtree(self.session, ignore_errors=True)


def start(rank: Rank, plan: Path, overrides: Sequence[str] = (), *, name: str = "instance") -> Driven:
    """COLLECTIVE: load and assemble this rank of a plan of one instance, traced. Nothing has run yet.

    `name` tells several of them in the same world apart.
    """
    files = Files(rank, name)
    flight = preflight(plan, overrides, check_tensors=False)
    place = place_of(flight.effective, rank.rank)
    collectives: list[Collective] = []
    trace = CollectiveTrace(place.instance.name, collectives.append)
    session = Path(files.gather("session", str(make_session()) if rank.rank == 0 else "")[0])
    loaded = worker.load(flight, place, trace)
    mine = worker.card(loaded, session)
    texts = files.gather("card", msgspec.json.encode(mine).decode())
    cards = [msgspec.json.decode(text, type=worker.RankCard) for text in texts]
    engine = worker.assemble(flight, loaded, cards, poison=True, trace=False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[object] = Inbox(context, ipc_address(session, f"test.{rank.rank}"), ToFrontend)
    driven = Driven(
        rank=rank,
        engine=engine,
        collectives=collectives,
        session=session,
        _inbox=inbox,
        _outbox=Outbox(context),
        _address=inbox_address(session, place.instance.name, rank.rank),
    )
    driven._outbox.send(driven._address, Hello(frontend=0, address=inbox.address))
    files.gather("ready", "")
    return driven


def never_park(driven: Driven) -> None:
    """From now on a step that finds no work returns at once; all decisions are kept."""

    def keep(proposals: Sequence[StepProposal], limits: AgreeLimits) -> StepDecision:
        decision = agree(proposals, limits)
        driven.decisions.append(decision)
        return decision

    setattr(rank_module, "agree", keep)  # noqa: B010
    setattr(rank_module.RankEngine, "_park", lambda *_: None)  # noqa: B010


@torch.inference_mode()
def run_steps(driven: Driven, until: int) -> None:
    """COLLECTIVE: turns of the loop until this many have been taken since the start."""
    while driven.engine.step_number < until:
        driven.engine.step()
        driven.collect()


@dataclass(frozen=True)
class Done:
    """What became of a rank's requests, and the decisions of the forward steps, of all ranks alike."""

    tokens: dict[int, list[int]]
    refused: dict[int, str]
    decisions: list[StepDecision]
    logprobs: dict[int, list[float]]


@torch.inference_mode()
def run_requests(
    driven: Driven, requests: Sequence[tuple[list[int], int]], *, micro_batches: MicroBatches = 1
) -> Done:
    """COLLECTIVE: all ranks' requests, (prompt, tokens to generate) each, to their end.

    The first step has all of them: ranks take it together, each with its own requests in hand.
    """
    engine = driven.engine
    engine.limits = replace(engine.limits, micro_batches=micro_batches)
    driven.tokens, driven.finished, driven.refused, driven.logprobs = {}, {}, {}, {}
    before = len(driven.decisions)
    for number, (prompt, max_tokens) in enumerate(requests):
        driven.submit(number, prompt, max_tokens)
    while engine.scheduler.num_requests + len(driven.refused) < len(requests):
        engine.desk.receive()
        driven.collect()
    while engine.step() is not StepKind.PARK:
        driven.collect()
    while len(driven.finished) + len(driven.refused) < len(requests):
        driven.collect()
    decisions = [d for d in driven.decisions[before:] if d.kind is StepKind.FORWARD]
    return Done(driven.tokens, driven.refused, decisions, driven.logprobs)
