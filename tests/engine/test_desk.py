"""A rank's desk: requests, leases and pulls come and go, and everything returns to the baseline."""

import pytest

from moe_runtime.engine.messages import (
    Abort,
    Collect,
    Goodbye,
    Hello,
    Prefilled,
    Ready,
    Refused,
    Release,
    Renew,
    Stats,
    StepTokens,
    Submit,
    SubmitTransferred,
    Wake,
)
from moe_runtime.errors import LeaseExpired, RequestRefused
from moe_runtime.spec.requests import Request, SamplingParams, Structure
from moe_runtime.transfer.handoff import Handoff, KVSource
from tests.engine.lone_desk import OnlyThrees, Rank, handed_over, request


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
