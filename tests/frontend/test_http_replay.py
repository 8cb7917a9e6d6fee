"""The load generator against servers that behave in every way, and the ranks' numbers read back."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from moe_runtime.errors import InputError
from moe_runtime.frontend import http_replay, scrape
from moe_runtime.frontend.board import Board
from moe_runtime.frontend.http_client import HttpFailure, Server, request
from moe_runtime.frontend.http_replay import Instances, replay_http, served_model
from moe_runtime.frontend.metrics import Metrics
from moe_runtime.frontend.replay import Arrival
from moe_runtime.frontend.scrape import Look, Scraper, read_ranks
from moe_runtime.report.records import OVERLAP_REASONS, PHASES, RequestRecord
from moe_runtime.spec.requests import SamplingParams
from tests.frontend.test_metrics import status

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(tokens: list[str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": "", "logprobs": {"tokens": tokens}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def usage(output: int, cached: int = 0) -> bytes:
    counts = {"completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def whole(status_line: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status_line}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def serve(handler: Handler, work: Callable[[Server], Awaitable[object]]) -> object:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.startswith(b"content-length")), 0
        )
        await handler(head + await reader.readexactly(length), writer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        return await work(Server.of(f"http://127.0.0.1:{port}/base/"))


def arrival(index: int, at: float = 0.0, output: int = 3) -> Arrival:
    return Arrival(
        index=index, at=at, prompt=[5, 6], sampling=SamplingParams(max_tokens=output, ignore_eos=True)
    )


def replay(handler: Handler, arrivals: list[Arrival], key: str | None = None) -> list[RequestRecord]:
    async def work(server: Server) -> list[RequestRecord]:
        names = Instances(prefill="prefill-0", decode=None)
        return await replay_http(server, arrivals, model="m", instances=names, key=key)

    return asyncio.run(serve(handler, work))  # type: ignore[arg-type]


def test_tokens_are_timed_as_they_come_however_the_bytes_are_cut():
    asked = []

    async def handler(raw: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(raw)
        writer.write(SSE + chunk(event(["a"])))
        await writer.drain()
        await asyncio.sleep(0.1)
        late = event(["b", "c"], "length") + usage(3, cached=1) + b"data: [DONE]\n\n"
        for i in range(0, len(late), 11):
            writer.write(chunk(late[i : i + 11]))
        writer.write(chunk(b""))

    first, second = replay(handler, [arrival(0), arrival(1, at=0.2)], key="secret")
    assert first.error is None
    assert (first.finish_reason, first.output_tokens, first.cached_tokens) == ("length", 3, 1)
    assert len(first.token_times) == 3
    assert 0.09 < first.token_times[1] - first.token_times[0] < 1.0
    assert first.token_times[1] == first.token_times[2], "they came together"
    assert second.scheduled_arrival - first.scheduled_arrival == pytest.approx(0.2)
    assert second.sent is not None
    assert second.sent >= second.scheduled_arrival
    assert (first.prefill_instance, first.decode_instance) == ("prefill-0", None)
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"authorization: Bearer secret" in head
    sent = json.loads(body)
    assert (sent["prompt"], sent["max_tokens"], sent["ignore_eos"], sent["stream"]) == ([5, 6], 3, True, True)


async def _busy(raw: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(whole("429 Too Many Requests", b'{"error": {"message": "come back later"}}'))


async def _failing(raw: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(
        SSE + chunk(event(["a"])) + chunk(b'data: {"error": {"message": "a rank died"}}\n\n') + chunk(b"")
    )


async def _cut(raw: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(SSE + chunk(event(["a"])))


async def _miscounting(raw: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(SSE + chunk(event(["a"], "length") + usage(2) + b"data: [DONE]\n\n") + chunk(b""))


async def _no_http(raw: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"what?\r\n\r\n")


@pytest.mark.parametrize(
    ("handler", "named"),
    [
        (_busy, "HTTP 429: come back later"),
        (_failing, "a rank died"),
        (_cut, "broke off"),
        (_miscounting, "the server counted 2 output tokens, 1 arrived"),
        (_no_http, "no HTTP answer"),
    ],
)
def test_what_goes_wrong_is_a_failed_record_that_says_why(handler, named):
    (record,) = replay(handler, [arrival(0)])
    assert record.finish_reason == "error"
    assert record.error is not None
    assert named in record.error


@pytest.mark.parametrize("host", ["127.0.0.1", "x" * 70 + ".invalid"])
def test_nobody_listens(host):
    async def work() -> None:
        async with request(Server.of(f"http://{host}:1"), "GET", "/"):
            raise AssertionError("port 1 answers")

    with pytest.raises(HttpFailure, match=f"cannot connect to {host}:1"):
        asyncio.run(work())


@pytest.mark.parametrize(
    ("shown", "named"),
    [([], None), ([0, 1], None), ([0], "0"), ([0, 1, 2], "0 to 2"), ([0, 1, 3, 7, 8], "0 to 1, 3, 7 to 8")],
)
def test_a_server_of_another_plan_is_refused(shown, named):
    metrics = Metrics(Board(), ranks_per_node=2)
    for rank in shown:
        metrics.observe_status(status(rank, time=10.0), now=10.0)

    async def handler(raw: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(whole("200 OK", metrics.render()))

    async def work(server: Server) -> None:
        ranks = [("unified", "unified-0", 0), ("unified", "unified-0", 1)]
        await Scraper(server).require_ranks(ranks, seconds=0.0)

    if named is None:
        asyncio.run(serve(handler, work))
        return
    named = f"its ranks are unified-0 rank {named}; the plan's are unified-0 rank 0 to 1$"
    with pytest.raises(InputError, match=named):
        asyncio.run(serve(handler, work))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x/?a=1"]
)
def test_bad_urls_are_named(url):
    with pytest.raises(InputError, match="URL|[Pp]ort|range"):
        Server.of(url)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (whole("200 OK", b'{"data": [{"id": "a"}]}'), None),
        (whole("200 OK", b'{"data": [{"id": "a"}, {"id": "b"}]}'), "2 models: a, b"),
        (whole("401 Unauthorized", b"no"), "answers 401: no"),
        (whole("200 OK", b"[]"), r"no list of models: \[\]"),
        (whole("200 OK", b"<html>"), "no list of models: <html>"),
        (b"", "does not answer within 0.1 s"),
    ],
)
def test_the_model_is_the_only_one_that_is_served(answer, named, monkeypatch):
    async def handler(raw: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if not answer:
            await asyncio.sleep(60)

    if not answer:
        monkeypatch.setattr(http_replay, "ANSWER_SECONDS", 0.1)

    async def work(server: Server) -> str:
        return await served_model(server, None)

    if named is None:
        assert asyncio.run(serve(handler, work)) == "a"
        return
    with pytest.raises(InputError, match=named):
        asyncio.run(serve(handler, work))


def test_metrics_that_do_not_come_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(scrape, "ANSWER_SECONDS", 0.02)

    async def main() -> None:
        done = asyncio.Event()

        async def silence(raw: bytes, writer: asyncio.StreamWriter) -> None:
            await done.wait()

        async def work(server: Server) -> None:
            scraper = Scraper(server)
            try:
                async with asyncio.timeout(10):
                    await scraper.require_ranks([("unified", "unified-0", 0)], seconds=0.0)
            finally:
                done.set()
            assert scraper.looks == []

        await serve(silence, work)

    asyncio.run(main())


def test_steps_out_of_metrics_keep_every_sum():
    board = Board()
    metrics = Metrics(board, ranks_per_node=2)
    scraper = Scraper(Server.of("http://unused"))
    for time, k in ((10.0, 0), (11.0, 3), (12.0, 3), (13.5, 10)):
        for rank in range(2):
            message = status(
                rank,
                time=time,
                kv_used=k,
                steps=k,
                step_seconds=0.1 * k,
                phase_seconds=[0.1 * k / len(PHASES)] * len(PHASES),
                decode_rows=7 * k,
                prefill_rows=11 * k + k,
                new_prefill_tokens=11 * k,
                recomputed_tokens=k,
                cached_prefill_tokens=5 * k,
                preemptions=k // 3,
                overlap_reasons=[0, 0, k, 0, 0],
                dispatch_modes=[0, k],
            )
            metrics.observe_status(message, now=time)
        scraper.looks.append(Look(time, read_ranks(metrics.render().decode())))
    first, second = scraper.steps(num_moe_layers=2)
    assert (first.instance, first.rank, second.rank) == ("unified-0", 0, 1)
    assert first.step.tolist() == list(range(10))
    assert (first.decode_tokens.sum(), first.prefill_tokens.sum()) == (70, 110)
    assert (first.recomputed_tokens.sum(), first.cached_tokens.sum(), first.preemptions.sum()) == (10, 50, 3)
    assert first.wall.sum() == pytest.approx(1.0)
    assert first.phases.sum() == pytest.approx(1.0)
    assert (first.start >= 10.0).all()
    assert (first.end <= 13.5).all()
    assert first.kv_used_blocks.tolist() == [3] * 3 + [10] * 7
    assert set(first.overlap_reason.tolist()) == {OVERLAP_REASONS.index("gain")}
    assert set(first.micro_batches.tolist()) == {2}
    assert Scraper(Server.of("http://unused")).steps(2) == []
