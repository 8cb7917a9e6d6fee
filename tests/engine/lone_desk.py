"""A rank's desk with a real scheduler and false neighbours: no device, sockets or transfers."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from moe_runtime.engine.balancing.desk import ExpertDesk
from moe_runtime.engine.balancing.load import ExpertLoad
from moe_runtime.engine.balancing.reload import Reloader
from moe_runtime.engine.clock import StepClock
from moe_runtime.engine.desk import RequestDesk
from moe_runtime.engine.device_step import Samples
from moe_runtime.engine.extras import keep_scores
from moe_runtime.engine.handovers import Handovers
from moe_runtime.engine.identity import Identity
from moe_runtime.engine.messages import (
    Hello,
    SubmitTransferred,
    ToFrontend,
    ToRank,
)
from moe_runtime.engine.promises import Promises, Room
from moe_runtime.engine.sampler import TopLogprobs
from moe_runtime.engine.tally import Tally
from moe_runtime.placement.placement import linear
from moe_runtime.report.records import StepLog
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.step import Scheduled, SchedulerLimits
from moe_runtime.spec.requests import Request, SamplingParams
from moe_runtime.transfer.handoff import Handoff, KVSource
from moe_runtime.transfer.leases import Leases

BLOCKS = 32
ROOM = 60  # tokens that the rank promises at most


@dataclass
class FakeInbox:
    messages: list = field(default_factory=list)

    def drain(self) -> list:
        taken, self.messages = self.messages, []
        # What travels must survive its encoding.
        return [msgspec.msgpack.decode(msgspec.msgpack.encode(m), type=ToRank) for m in taken]


@dataclass
class FakeOutbox:
    sent: list[tuple[str, object]] = field(default_factory=list)

    def send(self, address: str, message: msgspec.Struct) -> None:
        kind = ToFrontend if address == "frontend" else ToRank
        self.sent.append((address, msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)))

    def take(self, kind: type) -> list:
        found = [m for _, m in self.sent if isinstance(m, kind)]
        self.sent = [(a, m) for a, m in self.sent if not isinstance(m, kind)]
        return found


@dataclass
class FakePull:
    outcome: bool | Exception | None = None

    def poll(self) -> bool | None:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class FakeTransport:
    pulls: list[FakePull] = field(default_factory=list)
    sources: list[KVSource] = field(default_factory=list)

    def start_pull(self, source, blocks) -> FakePull:
        assert len(blocks) * 4 >= source.num_tokens
        assert len(blocks) >= len(source.blocks[0])
        self.sources.append(source)
        self.pulls.append(FakePull())
        return self.pulls[-1]

    def close(self) -> None:
        return None


@dataclass
class FakeStructures:
    """Compiles when the test says so."""

    started: list[Future] = field(default_factory=list)

    def start(self, structure) -> Future:
        self.started.append(Future())
        return self.started[-1]

    def close(self) -> None:
        return None


class OnlyThrees:
    """Allows token 3 and nothing else."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def mask(self):
        return np.array([1 << 3], np.int32)


def scores_of(scheduled: Scheduled) -> TopLogprobs | None:
    """Of the row at position p: -p, and four best tokens of which the first is p."""
    positions = scheduled.inputs.positions_T[scheduled.inputs.score_rows_S].astype(np.int64)
    if not len(positions):
        return None
    position_S = torch.from_numpy(positions)
    ids_SK = position_S[:, None] + torch.arange(4)
    return TopLogprobs(-position_S.float(), ids_SK, -ids_SK.float())


class Rank:
    """A desk with a scheduler, and steps whose samples are all 3."""

    def __init__(self, deployment: str, *, lease_seconds: float = 60.0, num_ranks: int = 1) -> None:
        self.inbox, self.outbox, self.transport = FakeInbox(), FakeOutbox(), FakeTransport()
        self.structures = FakeStructures()
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_batch_tokens=64,
                max_sequences=4,
                chunk_tokens=16,
                block_tokens=4,
                num_blocks=BLOCKS,
                max_positions=200,
                reuse_pulled=True,
            )
        )
        name = f"{deployment}-0"
        addresses = {("prefill-0", 0): "prefill", ("decode-0", 0): "decode", ("decode-0", 1): "peer"}
        identity = Identity(
            instance=name, deployment=deployment, rank=0, num_ranks=num_ranks, addresses=addresses
        )
        tally = Tally(1)
        reloader = Reloader(name, 0, {}, lambda path, placement, wanted: {})
        self.desk = RequestDesk(
            identity=identity,
            inbox=self.inbox,  # type: ignore[arg-type]
            outbox=self.outbox,  # type: ignore[arg-type]
            scheduler=self.scheduler,
            log=StepLog(instance=name, deployment=deployment, rank=0, num_moe_layers=1),
            clock=StepClock(),
            eos_token_ids=(7,),
            handovers=Handovers(
                identity=identity,
                outbox=self.outbox,  # type: ignore[arg-type]
                scheduler=self.scheduler,
                tally=tally,
                leases=Leases(lease_seconds),
                pool=None,
                transport=self.transport if deployment == "decode" else None,
                weights=lambda: reloader.version,
            ),
            promises=Promises(Room(tokens=ROOM, requests=3)),
            tally=tally,
            experts=ExpertDesk(
                instance=name,
                deployment=deployment,
                rank=0,
                layers=(1,),
                load=ExpertLoad(1, 4, torch.device("cpu")),
                placement=linear(num_layers=1, num_experts=4, num_ranks=1),
                reload=reloader,
            ),
            structures=self.structures,  # type: ignore[arg-type]
        )
        self.give(Hello(frontend=0, address="frontend"))

    def give(self, *messages: object) -> None:
        self.inbox.messages.extend(messages)
        self.desk.receive()

    def step(self) -> None:
        work = self.scheduler.propose()
        self.desk.after_propose()
        if work.decode_tokens or work.prefill_tokens:
            scheduled = self.scheduler.build(64)
            tokens = np.full(len(scheduled.sampled), 3, np.int32)
            keep_scores(scheduled, Samples(torch.from_numpy(tokens), scores=scores_of(scheduled)))
            self.desk.deliver(self.scheduler.commit(scheduled, tokens), {})
        self.scheduler.check_invariants(leased=self.desk.handovers.leases.num_blocks)

    def at_baseline(self) -> bool:
        return (
            self.scheduler.pool.num_free == BLOCKS
            and self.scheduler.num_requests == 0
            and len(self.desk.handovers.leases) == 0
            and self.desk.promises.tokens == self.desk.promises.requests == 0
        )


def request(i: int, length: int = 6, max_tokens: int = 5) -> Request:
    return Request(id=i, prompt=[9] * length, sampling=SamplingParams(max_tokens=max_tokens))


def handed_over(i: int, lease: int = 0, length: int = 6, salt: str = "") -> SubmitTransferred:
    blocks = [list(range(-(-length // 4)))]
    source = KVSource(instance="prefill-0", rank=0, lease=lease, num_tokens=length, blocks=blocks)
    asked = msgspec.structs.replace(request(i, length), cache_salt=salt)
    return SubmitTransferred(request=asked, handoff=Handoff(request=i, first_token=3, source=source))
