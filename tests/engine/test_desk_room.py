"""What a desk promises, and what a decode rank need not fetch as it is here already."""

from moe_runtime.engine.messages import (
    Abort,
    Full,
    Hello,
    Release,
    Reserve,
    Reserved,
    StepTokens,
    Submit,
)
from moe_runtime.errors import LeaseExpired
from tests.engine.lone_desk import Rank, handed_over, request


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
