"""A rank's desk: requests, leases and pulls come and go, and everything returns to the baseline."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
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
    Abort,
    Collect,
    Full,
    Goodbye,
    Hello,
    Prefilled,
    PromptDone,
    PromptLogprobs,
    Ready,
    Refused,
    Release,
    Renew,
    Reserve,
    Reserved,
    Stats,
    StepTokens,
    Submit,
    SubmitTransferred,
    ToFrontend,
    ToRank,
    Wake,
)
from moe_runtime.engine.promises import Promises, Room
from moe_runtime.engine.sampler import TopLogprobs
from moe_runtime.engine.tally import Tally
from moe_runtime.errors import LeaseExpired, RequestRefused
from moe_runtime.placement.placement import linear
from moe_runtime.report.records import StepLog
from moe_runtime.scheduler.scheduler import Scheduled, Scheduler, SchedulerLimits
from moe_runtime.spec.requests import Request, SamplingParams, Structure
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


@pytest.mark.parametrize(("weights", "rows"), [(0, (1, 0)), (7, (0, 7))], ids=["the same", "others"])
def test_kv_of_other_weights_is_computed_again(weights, rows):
    """The weights of the decode side, or of the prefill side, may change while KV is on its way."""
    rank = Rank("decode")
    rank.give(handed_over(1))
    rank.step()
    rank.desk.experts.reload.version = weights
    rank.transport.pulls[0].outcome = True
    rank.desk.receive()
    work = rank.scheduler.propose()
    assert (work.decode_tokens, work.prefill_tokens) == rows


def test_kv_says_which_weights_computed_it():
    rank = Rank("prefill")
    rank.desk.experts.reload.version = 7
    rank.give(Submit(request=request(1), handoff=True))
    rank.step()
    (message,) = rank.outbox.take(Prefilled)
    assert message.handoff.source.weights == 7


def test_a_unified_request_gives_all_its_tokens():
    rank = Rank("unified")
    assert rank.outbox.take(Ready) == [Ready(instance="unified-0", rank=0)]
    rank.give(Submit(request=request(1), handoff=False))
    for _ in range(8):
        rank.step()
    batches = rank.outbox.take(StepTokens)
    tokens = [t for b in batches for t in b.tokens]
    assert [t.token for t in tokens] == [3] * 5
    assert [t.finish_reason for t in tokens] == [None] * 4 + ["length"]
    assert rank.at_baseline()


def scored(i: int, max_tokens: int, length: int = 20) -> Request:
    """A prompt of two chunks of which the two best tokens are wanted at each place."""
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2)
    return Request(id=i, prompt=[9] * length, sampling=sampling)


EXPECTED = PromptLogprobs(
    2,
    (-np.arange(19, dtype=np.float32)).tobytes(),
    (np.arange(19, dtype=np.int32)[:, None] + np.arange(2, dtype=np.int32)).tobytes(),
    (-np.arange(19, dtype=np.float32)[:, None] - np.arange(2, dtype=np.float32)).tobytes(),
)


@pytest.mark.parametrize("deployment", ["unified", "prefill"])
def test_a_prompt_alone_ends_with_its_logprobs_and_no_token(deployment):
    rank = Rank(deployment)
    for number, length in ((1, 20), (2, 1)):
        rank.give(Submit(request=scored(number, 0, length), handoff=deployment == "prefill"))
        rank.step()
        rank.step()
        (message,) = rank.outbox.take(PromptDone)
        assert (message.request, message.instance) == (number, f"{deployment}-0")
        found = message.start.prompt_logprobs
        assert found == (EXPECTED if length > 1 else PromptLogprobs(0, b"", b"", b""))
    assert rank.outbox.take(StepTokens) + rank.outbox.take(Prefilled) == []
    assert rank.desk.tally.output_tokens == 0
    assert rank.at_baseline()


def test_logprobs_of_a_prompt_come_once_with_its_first_token():
    rank = Rank("unified")
    rank.give(Submit(request=scored(1, 4), handoff=False))
    for _ in range(7):
        rank.step()
    tokens = [t for m in rank.outbox.take(StepTokens) for t in m.tokens]
    assert [t.start and t.start.prompt_logprobs for t in tokens] == [EXPECTED, None, None, None]


def test_logprobs_of_a_prompt_come_with_its_handover():
    rank = Rank("prefill")
    rank.give(Submit(request=scored(1, 4), handoff=True))
    rank.step()
    assert rank.scheduler.by_request[1].scores, "the first chunk's are here"
    rank.step()
    (message,) = rank.outbox.take(Prefilled)
    assert message.start.prompt_logprobs == EXPECTED


def prefilled() -> Rank:
    rank = Rank("prefill")
    rank.give(Submit(request=request(1), handoff=True))
    rank.step()
    (message,) = rank.outbox.take(Prefilled)
    assert message.handoff.first_token == 3
    assert len(message.handoff.source.blocks[0]) == 2
    assert not rank.at_baseline()
    return rank


def test_a_lease_ends_by_release_once():
    rank = prefilled()
    rank.give(Release(lease=0), Release(lease=0), Release(lease=5))
    assert rank.at_baseline()


def test_a_lease_ends_by_abort():
    rank = prefilled()
    rank.give(Abort(request=1))
    assert rank.at_baseline()
    rank.give(Release(lease=0))
    assert rank.at_baseline()


def test_a_lease_ends_by_itself_and_lives_on_while_it_is_renewed():
    rank = prefilled()
    (lease,) = rank.desk.handovers.leases.expire(1e12)
    rank.desk.handovers.leases.seconds = 0.0
    rank.desk.handovers.leases.grant(1, lease.blocks, now=0.0)
    rank.desk.handovers.leases.seconds = 60.0
    rank.inbox.messages.append(Renew(lease=1))
    rank.desk.receive()
    assert len(rank.desk.handovers.leases) == 1, "renewed in time"
    rank.desk.handovers.leases.seconds = 0.0
    rank.give(Renew(lease=1))
    assert rank.at_baseline()


@pytest.mark.parametrize("state", ["queued", "pulling", "decoding"])
@pytest.mark.parametrize("outcome", [True, LeaseExpired("over")])
def test_an_abort_on_the_decode_side_in_every_state(state, outcome):
    rank = Rank("decode")
    rank.give(handed_over(1))
    if state != "queued":
        rank.step()
        assert len(rank.transport.pulls) == 1
    if state == "decoding":
        rank.transport.pulls[0].outcome = outcome
        rank.give()
        rank.step()
    rank.give(Abort(request=1), Abort(request=1))
    if state == "pulling":
        assert not rank.at_baseline(), "blocks stay while something may still be written to them"
        assert rank.desk.patience() < 0.01
        rank.give(Goodbye(frontend=0, frontends=1))
        assert not rank.desk.idle_stop, "a pull under way is not idle"
        rank.transport.pulls[0].outcome = outcome
        rank.give()
    rank.step()
    assert rank.at_baseline()
    assert rank.outbox.take(Release) == [Release(lease=0)]


@pytest.mark.parametrize("outcome", [True, LeaseExpired("over")])
def test_a_pull_that_fails_is_made_good_by_recomputing(outcome):
    rank = Rank("decode")
    rank.give(handed_over(1))
    rank.step()
    rank.transport.pulls[0].outcome = outcome
    rank.give()
    for _ in range(8):
        rank.step()
    tokens = [t for b in rank.outbox.take(StepTokens) for t in b.tokens]
    assert [t.token for t in tokens] == [3] * 4
    assert rank.at_baseline()


def test_leases_of_queued_requests_are_renewed():
    rank = Rank("decode", lease_seconds=0.0)
    rank.give(*(handed_over(i, lease=i) for i in range(6)))
    rank.step()  # four rows: two stay queued
    rank.outbox.take(Renew)
    rank.give()
    assert sorted(m.lease for m in rank.outbox.take(Renew)) == list(range(6))


def test_a_request_that_cannot_fit_is_refused_and_its_lease_released():
    rank = Rank("decode")
    rank.give(handed_over(1, length=190))
    (refusal,) = rank.outbox.take(Refused)
    assert refusal.request == 1
    assert refusal.reason.startswith("decode: prompt 190 + max_tokens 5 exceed")
    assert rank.outbox.take(Release) == [Release(lease=0)]
    assert rank.at_baseline()


def test_a_prefill_rank_needs_room_for_the_prompt_only():
    rank = Rank("prefill")
    rank.give(Submit(request=request(1, length=100, max_tokens=90), handoff=True))
    assert rank.outbox.take(Refused) == []
    rank.give(Submit(request=request(2, length=150, max_tokens=5), handoff=True))
    assert [r.request for r in rank.outbox.take(Refused)] == [2]


def test_wakes_of_later_steps_are_remembered():
    rank = Rank("decode", num_ranks=2)
    rank.give(Wake(step=5), Wake(step=3))
    assert rank.desk.wake_step == 5
    rank.desk.wake_peers(9)
    assert rank.outbox.sent[-1] == ("peer", Wake(step=9))


def test_collected_steps_and_shutdown():
    rank = Rank("unified")
    rank.give(Collect())
    (stats,) = rank.outbox.take(Stats)
    assert stats.batch.num_steps == 0
    assert stats.timeline.spans == []
    rank.give(Submit(request=request(1), handoff=False), Goodbye(frontend=0, frontends=1))
    assert not rank.desk.idle_stop
    for _ in range(8):
        rank.step()
    assert rank.desk.idle_stop


def structured(i: int) -> Request:
    sampling = SamplingParams(max_tokens=5, structure=Structure(kind="json"))
    return Request(id=i, prompt=[1] * 6, sampling=sampling)


def test_a_structured_request_waits_for_its_constraint_while_others_run():
    rank = Rank("unified")
    rank.give(Submit(request=structured(1), handoff=False), Submit(request=request(2), handoff=False))
    rank.step()
    assert [t.request for m in rank.outbox.take(StepTokens) for t in m.tokens] == [2]
    assert not rank.desk.idle_stop
    constraint = OnlyThrees()
    rank.structures.started[0].set_result(constraint)
    rank.give()
    while rank.scheduler.num_requests:
        rank.step()
    assert constraint.accepted == [3] * 5
    assert rank.at_baseline()


def test_a_structured_request_may_be_aborted_or_refused_while_it_is_compiled():
    rank = Rank("decode")
    source = KVSource(instance="prefill-0", rank=0, lease=5, num_tokens=6, blocks=[[0, 1]])
    for i in (1, 2):
        handoff = Handoff(request=i, first_token=3, source=source)
        rank.give(SubmitTransferred(request=structured(i), handoff=handoff))
    rank.give(Abort(request=1))
    assert len(rank.outbox.take(Release)) == 1
    rank.structures.started[0].set_result(OnlyThrees())
    rank.structures.started[1].set_exception(RequestRefused("no such schema"))
    rank.give()
    assert [r.reason for r in rank.outbox.take(Refused)] == ["decode: no such schema"]
    assert len(rank.outbox.take(Release)) == 1
    rank.give(Goodbye(frontend=0, frontends=1))
    assert rank.at_baseline()
    assert rank.desk.idle_stop


def test_the_last_frontend_to_leave_stops_the_rank():
    rank = Rank("unified")
    rank.give(Hello(frontend=1, address="frontend"))
    rank.outbox.take(Ready)
    rank.give(Goodbye(frontend=0, frontends=2))
    assert not rank.desk.idle_stop
    rank.give(Collect())  # only who is still there hears of it
    assert len(rank.outbox.take(Stats)) == 1
    rank.give(Goodbye(frontend=1, frontends=2))
    assert rank.desk.idle_stop


def bounded(i: int, length: int = 6, max_tokens: int = 5, *, handoff: bool = False) -> Submit:
    return Submit(request=request(i, length, max_tokens), handoff=handoff, bounded=True)


def test_a_rank_promises_tokens_and_requests_up_to_its_room():
    """What one frontend has been promised another one cannot have; what ends makes room again."""
    rank = Rank("unified")
    other = 1 << 48
    rank.give(Hello(frontend=1, address="frontend"))
    rank.give(bounded(1, 20, 20), bounded(other, 10, 10), bounded(2, 1, 1), bounded(other + 1, 1, 1))
    turned_away = rank.outbox.take(Full)
    assert [(m.request, m.tokens, m.requests) for m in turned_away] == [(2, 60, 2), (other + 1, 60, 2)]
    assert (turned_away[0].instance, turned_away[0].rank) == ("unified-0", 0)
    assert rank.scheduler.num_requests == 2
    rank.give(Abort(request=1), *(bounded(i, 1, 1) for i in (3, 4, 5)))
    assert [m.request for m in rank.outbox.take(Full)] == [5], "tokens would fit, a fourth request does not"
    rank.give(Submit(request=request(6, 40, 40), handoff=False))
    assert rank.outbox.take(Full) == [], "who does not ask for a bound waits"
    while rank.scheduler.num_requests:
        rank.step()
    assert rank.at_baseline()


def test_a_place_on_the_decode_side_is_kept_while_the_prompt_runs_elsewhere():
    rank = Rank("decode")
    rank.give(Reserve(request=1, tokens=11), Reserve(request=2, tokens=50), Reserve(request=3, tokens=40))
    assert [m.request for m in rank.outbox.take(Reserved)] == [1, 3]
    assert [m.request for m in rank.outbox.take(Full)] == [2]
    rank.give(handed_over(1), Abort(request=3))
    assert (rank.desk.promises.tokens, rank.desk.promises.requests) == (11, 1)
    rank.step()
    rank.transport.pulls[0].outcome = True
    rank.give()
    while rank.scheduler.num_requests:
        rank.step()
    assert rank.at_baseline()


def test_leased_blocks_take_of_the_room_of_a_prefill_rank():
    rank = Rank("prefill")
    rank.give(bounded(1, 30, 150, handoff=True))
    while rank.scheduler.num_requests:
        rank.step()
    rank.give(bounded(2, 29, 5, handoff=True))
    assert [m.tokens for m in rank.outbox.take(Full)] == [32]
    rank.give(Release(lease=0), bounded(3, 29, 5, handoff=True))
    assert rank.outbox.take(Full) == []


# -- KV that a decode rank has already ---------------------------------------------------------------


def decoded_before(length: int) -> Rank:
    """A decode rank that has served a prompt of so many tokens."""
    rank = Rank("decode")
    rank.give(handed_over(1, length=length))
    rank.step()
    rank.transport.pulls[0].outcome = True
    rank.give()
    while rank.scheduler.num_requests:
        rank.step()
    rank.outbox.take(Release)
    return rank


def test_only_what_is_not_here_is_pulled():
    rank = decoded_before(10)
    rank.give(handed_over(2, lease=5, length=22))
    rank.step()
    source = rank.transport.sources[-1]
    assert (source.lease, source.blocks, source.num_tokens) == (5, [[2, 3, 4, 5]], 14)
    totals = rank.desk.tally.totals()
    assert (totals.pulled_tokens, totals.reused_tokens) == (10 + 14, 8)
    rank.transport.pulls[-1].outcome = True
    rank.give()
    assert rank.outbox.take(Release) == [Release(lease=5)]
    while rank.scheduler.num_requests:
        rank.step()
    assert rank.at_baseline()


def test_a_prompt_that_is_here_whole_is_not_pulled_and_its_lease_ends():
    rank = decoded_before(8)
    rank.give(handed_over(2, lease=5, length=8))
    rank.step()
    assert len(rank.transport.pulls) == 1
    assert rank.desk.patience() < 0.01
    rank.give()
    assert rank.outbox.take(Release) == [Release(lease=5)]
    rank.outbox.take(StepTokens)
    rank.step()
    assert [t.token for m in rank.outbox.take(StepTokens) for t in m.tokens] == [3]
    rank.give(Abort(request=2))
    assert rank.at_baseline()


def test_another_salt_shares_nothing():
    rank = decoded_before(10)
    rank.give(handed_over(2, length=10, salt="another"))
    rank.step()
    assert rank.transport.sources[-1].num_tokens == 10


def test_a_failed_pull_leaves_what_is_shared_as_it_is():
    """Shared blocks are in use by others: only what was to be pulled is computed."""
    rank = decoded_before(10)
    rank.give(handed_over(2, length=22))
    rank.step()
    row = rank.scheduler.by_request[2].row
    rank.transport.pulls[-1].outcome = LeaseExpired("over")
    rank.give()
    assert rank.scheduler.table.num_computed[row] == 8
    while rank.scheduler.num_requests:
        rank.step()
    assert rank.at_baseline()


def test_what_old_weights_computed_is_not_reused_once_they_are_gone():
    rank = decoded_before(10)
    rank.give(handed_over(2, length=22))
    rank.step()
    row = rank.scheduler.by_request[2].row
    rank.scheduler.forget_kv()
    rank.transport.pulls[-1].outcome = True
    rank.give()
    assert rank.scheduler.table.num_computed[row] == 0
    while rank.scheduler.num_requests:
        rank.step()
    assert rank.at_baseline()
