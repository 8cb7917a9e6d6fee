"""The fleet over real sockets, its ranks played by the test."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from moe_runtime.engine.messages import (
    FRONTEND_SHIFT,
    Abort,
    Full,
    Goodbye,
    Hello,
    Logprobs,
    Prefilled,
    PromptDone,
    PromptLogprobs,
    Ready,
    Refused,
    Reserve,
    Reserved,
    Start,
    StepTokens,
    Submit,
    SubmitTransferred,
    Token,
    ToRank,
)
from moe_runtime.errors import NoRoom, RequestRefused
from moe_runtime.frontend.bootstrap import Bootstrap, RankAddress
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.spec.requests import FinishReason, SamplingParams
from moe_runtime.transfer.handoff import Handoff, KVSource


class Rank:
    """One rank's inbox, and a way to the frontend."""

    def __init__(self, context, folder: Path, role: str, instance: int) -> None:
        self.name = f"{role}-{instance}"
        self.address = f"ipc://{folder}/{self.name}"
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(self.address)
        self.frontend = context.socket(zmq.PUSH)
        self.decoder = msgspec.msgpack.Decoder(ToRank)

    def card(self, role: str) -> RankAddress:
        return RankAddress(
            instance=self.name,
            deployment=role,
            rank=0,
            address=self.address,
            kv_tokens=1000,
            max_sequences=4,
        )

    async def hears(self, kind):
        message = self.decoder.decode(await asyncio.wait_for(self.inbox.recv(), 5))
        assert isinstance(message, kind), message
        return message

    async def hears_nothing(self) -> None:
        assert await self.inbox.poll(30) == 0

    async def welcome(self) -> None:
        hello = await self.hears(Hello)
        self.frontend.connect(hello.address)
        await self.says(Ready(instance=self.name, rank=0))

    async def says(self, message: msgspec.Struct) -> None:
        await self.frontend.send(msgspec.msgpack.encode(message))

    async def sends(self, *tokens: Token) -> None:
        await self.says(StepTokens(instance=self.name, rank=0, tokens=list(tokens)))


def run(tmp_path: Path, roles: tuple[str, ...], story, *, frontend: int = 0, bounded: bool = False) -> None:
    """Run `await story(fleet, *ranks)` with a fleet whose ranks are ready."""

    async def go() -> None:
        context = zmq.asyncio.Context()
        ranks = [Rank(context, tmp_path, role, roles[:i].count(role)) for i, role in enumerate(roles)]
        cards = [rank.card(role) for rank, role in zip(ranks, roles, strict=True)]
        address = f"ipc://{tmp_path}/frontend"
        bootstrap = Bootstrap(frontend=frontend, frontends=2, address=address, ranks=cards)
        fleet = Fleet(bootstrap, bounded=bounded)
        assert fleet.missing == [f"{r.name} rank 0" for r in ranks]
        try:
            welcomes = [asyncio.create_task(r.welcome()) for r in ranks]
            await asyncio.wait_for(fleet.start(), 5)
            await asyncio.gather(*welcomes)
            assert fleet.missing == []
            await asyncio.wait_for(story(fleet, *ranks), 10)
            assert fleet._live == {}
            assert not any(any(fleet._routes.router(role).outstanding) for role in roles)
        finally:
            await fleet.shutdown()
            for rank in ranks:
                assert await rank.hears(Goodbye) == Goodbye(frontend=frontend, frontends=2)
            context.destroy(linger=0)

    asyncio.run(go())


def handoff(request: int, rank: Rank) -> Handoff:
    source = KVSource(instance=rank.name, rank=0, lease=1, num_tokens=3, blocks=[[0]])
    return Handoff(request=request, first_token=7, source=source)


def test_tokens_come_one_by_one_and_each_is_news(tmp_path):
    async def story(fleet, rank):
        news: list[int] = []
        live = fleet.submit(
            [1, 2, 3], SamplingParams(max_tokens=2), priority=4, cache_salt="s", notify=lambda: news.append(1)
        )
        submit = await rank.hears(Submit)
        assert submit.request.id >> FRONTEND_SHIFT == 3
        assert (submit.request.priority, submit.request.cache_salt, submit.handoff) == (4, "s", False)
        first = Logprobs(-0.5, [], [])
        await rank.sends(Token(live.request.id, 7, None, None, first, Start(2, 0.25)))
        while not news:
            await asyncio.sleep(0.001)
        assert (live.token_ids, live.cached_tokens, live.queue_seconds) == ([7], 2, 0.25)
        assert not live.done.is_set()
        await rank.sends(Token(live.request.id, 8, FinishReason.LENGTH), Token(999, 1))
        await live.done.wait()
        assert (live.token_ids, live.finish_reason, live.logprobs) == ([7, 8], "length", [first])
        assert len(news) == 2

    run(tmp_path, ("unified",), story, frontend=3)


SCORES = PromptLogprobs(0, bytes(8), b"", b"")


def test_a_prompt_that_wants_no_tokens_ends_where_it_ran(tmp_path):
    async def story(fleet, prefill, decode):
        live = fleet.submit([1, 2, 3], SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert (await prefill.hears(Submit)).handoff
        start = Start(0, 0.5, SCORES)
        await prefill.says(PromptDone(request=live.request.id, instance=prefill.name, start=start))
        await live.done.wait()
        assert (live.token_ids, live.finish_reason, live.queue_seconds) == ([], "length", 0.5)
        assert live.prompt_logprobs == SCORES
        await prefill.says(PromptDone(request=999, instance=prefill.name))
        # It holds no place any more, and nobody is told to drop it.
        await prefill.hears_nothing()
        await decode.hears_nothing()

    run(tmp_path, ("prefill", "decode"), story)


def test_logprobs_of_a_prompt_come_with_its_handover(tmp_path):
    async def story(fleet, prefill, decode):
        live = fleet.submit([1, 2, 3], SamplingParams(max_tokens=2, prompt_logprobs=0))
        await prefill.hears(Submit)
        there = handoff(live.request.id, prefill)
        await prefill.says(Prefilled(handoff=there, start=Start(0, 0.0, SCORES)))
        await decode.hears(SubmitTransferred)
        assert live.prompt_logprobs == SCORES
        await decode.sends(Token(live.request.id, 8, FinishReason.LENGTH))
        await live.done.wait()
        assert (live.token_ids, live.prompt_logprobs) == ([7, 8], SCORES)

    run(tmp_path, ("prefill", "decode"), story)


def test_an_abort_ends_a_request_once(tmp_path):
    async def story(fleet, rank):
        live = fleet.submit([1], SamplingParams())
        await rank.hears(Submit)
        fleet.abort(live, FinishReason.ERROR, "why")
        assert (live.finish_reason, live.error, live.done.is_set()) == ("error", "why", True)
        assert (await rank.hears(Abort)).request == live.request.id
        fleet.abort(live)
        await rank.sends(Token(live.request.id, 7))  # was on its way
        await rank.hears_nothing()
        assert live.token_ids == []

    run(tmp_path, ("unified",), story)


def test_a_refusal_is_told_apart(tmp_path):
    async def story(fleet, rank):
        live = fleet.submit([1], SamplingParams())
        await rank.says(Refused(request=live.request.id, instance=rank.name, reason="no"))
        await live.done.wait()
        assert (live.refused, live.finish_reason, live.error) == (True, "error", "no")
        await rank.hears(Submit)
        with pytest.raises(RequestRefused, match="rank 5"):
            fleet.submit([1], SamplingParams(), rank=5)

    run(tmp_path, ("unified",), story)


def test_a_prefilled_request_goes_on_elsewhere(tmp_path):
    async def story(fleet, prefill, decode):
        live = fleet.submit([1, 2, 3], SamplingParams(max_tokens=2))
        assert (await prefill.hears(Submit)).handoff
        start = Start(1, 0.5)
        await prefill.says(Prefilled(handoff=handoff(live.request.id, prefill), start=start))
        moved = await decode.hears(SubmitTransferred)
        assert moved.request == live.request
        assert (live.token_ids, live.cached_tokens) == ([7], 1)
        await decode.sends(Token(live.request.id, 8, FinishReason.STOP, None, None, Start(0, 0.0)))
        await live.done.wait()
        assert (live.token_ids, live.cached_tokens, live.queue_seconds) == ([7, 8], 1, 0.5)
        assert (live.prefill_instance, live.decode_instance) == ("prefill-0", "decode-0")

    run(tmp_path, ("prefill", "decode"), story)


def test_an_abort_follows_a_request_to_where_it_is(tmp_path):
    async def story(fleet, prefill, decode):
        early, late = (fleet.submit([1, 2, 3], SamplingParams()) for _ in range(2))
        for _ in range(2):
            await prefill.hears(Submit)
        fleet.abort(early)
        assert (await prefill.hears(Abort)).request == early.request.id
        # Its KV was ready at that moment: nobody wants it.
        await prefill.says(Prefilled(handoff=handoff(early.request.id, prefill)))
        assert (await prefill.hears(Abort)).request == early.request.id
        await prefill.says(Prefilled(handoff=handoff(late.request.id, prefill)))
        await decode.hears(SubmitTransferred)
        fleet.abort(late)
        assert (await decode.hears(Abort)).request == late.request.id
        await prefill.hears_nothing()

    run(tmp_path, ("prefill", "decode"), story)


def test_without_a_rank_to_decode_on_nothing_is_begun(tmp_path):
    async def story(fleet, prefill, decode):
        fleet._routes.router("decode").set_down(0, down=True)
        with pytest.raises(RequestRefused, match="no rank is up"):
            fleet.submit([1, 2, 3], SamplingParams())
        await prefill.hears_nothing()
        only_one = fleet.submit([1, 2, 3], SamplingParams(max_tokens=1))
        await prefill.hears(Submit)
        await prefill.sends(Token(only_one.request.id, 7, FinishReason.LENGTH))
        await only_one.done.wait()

    run(tmp_path, ("prefill", "decode"), story)


# -- ranks that are full ----------------------------------------------------------------------------


def full(rank: Rank, request: int, tokens: int = 2000, requests: int = 8) -> Full:
    return Full(request=request, instance=rank.name, rank=0, tokens=tokens, requests=requests)


def test_a_request_that_a_rank_turns_away_goes_to_the_next_until_none_is_left(tmp_path):
    async def story(fleet, one, two):
        live = fleet.submit([1, 2, 3], SamplingParams())
        submit = await one.hears(Submit)
        assert submit.bounded
        await one.says(full(one, live.request.id))
        assert (await two.hears(Submit)).request == live.request
        later = fleet.submit([1], SamplingParams())
        await two.hears(Submit)
        await two.says(full(two, live.request.id, tokens=1900))
        await live.done.wait()
        assert (live.no_room, live.finish_reason) == (True, "error")
        with pytest.raises(NoRoom):  # 2000 and 1900 tokens are known to be there, of 2000
            fleet.submit([1] * 90, SamplingParams(max_tokens=200))
        fleet.abort(later)
        assert (await two.hears(Abort)).request == later.request.id
        await one.hears_nothing()

    run(tmp_path, ("unified", "unified"), story, bounded=True)


def test_a_rank_that_is_asked_for_by_name_is_not_exchanged_for_another(tmp_path):
    async def story(fleet, one, two):
        live = fleet.submit([1, 2, 3], SamplingParams(), rank=1)
        await two.hears(Submit)
        await two.says(full(two, live.request.id))
        await live.done.wait()
        assert live.no_room
        await one.hears_nothing()

    run(tmp_path, ("unified", "unified"), story, bounded=True)


def test_a_request_is_handed_over_when_its_place_is_sure(tmp_path):
    """The first token waits for the decode side's word, however soon the prompt has run."""

    async def story(fleet, prefill, one, two):
        news: list[int] = []
        live = fleet.submit([1, 2, 3], SamplingParams(max_tokens=4), notify=lambda: news.append(1))
        await prefill.hears(Submit)
        reserve = await one.hears(Reserve)
        assert (reserve.request, reserve.tokens) == (live.request.id, 7)
        await prefill.says(Prefilled(handoff=handoff(live.request.id, prefill)))
        await one.says(full(one, live.request.id))
        await two.hears(Reserve)
        assert news == []
        await two.says(Reserved(request=live.request.id))
        await two.hears(SubmitTransferred)
        assert (news, live.token_ids) == ([1], [7])
        fleet.abort(live)
        await two.hears(Abort)
        await one.hears_nothing()

    run(tmp_path, ("prefill", "decode", "decode"), story, bounded=True)


def test_a_place_that_is_not_needed_is_given_back(tmp_path):
    async def story(fleet, prefill, decode):
        ended, hopeless = (fleet.submit([1, 2, 3], SamplingParams(max_tokens=4)) for _ in range(2))
        for _ in range(2):
            await prefill.hears(Submit)
            await decode.hears(Reserve)
        await decode.says(Reserved(request=ended.request.id))
        await prefill.sends(Token(ended.request.id, 7, FinishReason.STOP))
        assert (await decode.hears(Abort)).request == ended.request.id
        await prefill.says(Prefilled(handoff=handoff(hopeless.request.id, prefill)))
        await decode.says(full(decode, hopeless.request.id))
        await hopeless.done.wait()
        assert hopeless.no_room
        assert (await prefill.hears(Abort)).request == hopeless.request.id

    run(tmp_path, ("prefill", "decode"), story, bounded=True)


def test_a_message_that_is_none_ends_everything_that_waits(tmp_path):
    async def story(fleet, rank):
        live = fleet.submit([1], SamplingParams())
        await rank.hears(Submit)
        await rank.frontend.send(b"\xc1")
        await live.done.wait()
        assert live.error == "the frontend stopped reading"
        assert (await rank.hears(Abort)).request == live.request.id
        with pytest.raises(msgspec.DecodeError):
            await fleet.until_failure()

    run(tmp_path, ("unified",), story)
