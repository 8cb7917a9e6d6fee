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
    Goodbye,
    Hello,
    Logprobs,
    Prefilled,
    Ready,
    Refused,
    Start,
    StepTokens,
    Submit,
    SubmitTransferred,
    Token,
    ToRank,
)
from moe_runtime.errors import RequestRefused
from moe_runtime.frontend.bootstrap import Bootstrap, RankAddress
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.spec.requests import FinishReason, SamplingParams
from moe_runtime.transfer.handoff import Handoff, KVSource


class Rank:
    """One rank's inbox, and a way to the frontend."""

    def __init__(self, context, folder: Path, role: str) -> None:
        self.name = f"{role}-0"
        self.address = f"ipc://{folder}/{role}"
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(self.address)
        self.frontend = context.socket(zmq.PUSH)
        self.decoder = msgspec.msgpack.Decoder(ToRank)

    def card(self, role: str) -> RankAddress:
        return RankAddress(instance=self.name, deployment=role, rank=0, address=self.address, kv_tokens=1000)

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


def run(tmp_path: Path, roles: tuple[str, ...], story, *, frontend: int = 0) -> None:
    """Run `await story(fleet, *ranks)` with a fleet whose ranks are ready."""

    async def go() -> None:
        context = zmq.asyncio.Context()
        ranks = [Rank(context, tmp_path, role) for role in roles]
        cards = [rank.card(role) for rank, role in zip(ranks, roles, strict=True)]
        address = f"ipc://{tmp_path}/frontend"
        fleet = Fleet(Bootstrap(frontend=frontend, frontends=2, address=address, ranks=cards))
        assert fleet.missing == [f"{r.name} rank 0" for r in ranks]
        try:
            welcomes = [asyncio.create_task(r.welcome()) for r in ranks]
            await asyncio.wait_for(fleet.start(), 5)
            await asyncio.gather(*welcomes)
            assert fleet.missing == []
            await asyncio.wait_for(story(fleet, *ranks), 10)
            assert fleet._live == {}
            assert all(r.outstanding == [0] for r in fleet._routers.values())
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
        await rank.says(Refused(request=live.request.id, reason="no"))
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


def test_without_a_rank_to_decode_on_the_kv_is_given_back(tmp_path):
    async def story(fleet, prefill, decode):
        live = fleet.submit([1, 2, 3], SamplingParams())
        await prefill.hears(Submit)
        fleet._routers["decode"].set_down(0, down=True)
        await prefill.says(Prefilled(handoff=handoff(live.request.id, prefill)))
        await live.done.wait()
        assert (live.finish_reason, live.error) == ("error", "no rank is up")
        assert (await prefill.hears(Abort)).request == live.request.id

    run(tmp_path, ("prefill", "decode"), story)


def test_a_message_that_is_none_ends_everything_that_waits(tmp_path):
    async def story(fleet, rank):
        live = fleet.submit([1], SamplingParams())
        await rank.hears(Submit)
        await rank.frontend.send(b"\xc1")
        await live.done.wait()
        assert live.error == "the frontend stopped reading"
        with pytest.raises(msgspec.DecodeError):
            await fleet.until_failure()

    run(tmp_path, ("unified",), story)
