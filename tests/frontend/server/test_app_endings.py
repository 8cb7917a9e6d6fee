"""How requests end: by themselves, by their client, by the server."""

import asyncio
import json
import time

import httpx
import pytest
from opentelemetry import trace

from moe_runtime.engine.balancing.wire import BalancingStatus
from moe_runtime.frontend.server.lifecycle import finish
from tests.frontend.server import stub
from tests.frontend.server.client import run, until
from tests.frontend.server.corpus import COMPLETIONS
from tests.frontend.server.stub import StubServer, rank_status

ASKED = {"model": "stub", "prompt": "hi"}


async def open_request(server: StubServer, *, stream: bool, chunks: int = 0):
    """Send a request as a server hears it; returns the task, what was sent, and a function that hangs up.

    Its output stops after as many tokens as `chunks`, until `hold` is set.
    """
    if chunks:
        server.backend.hold_after = chunks
    body = json.dumps({"model": "stub", "prompt": "hi", "stream": stream}).encode()
    inbox: asyncio.Queue = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "headers": [(b"x-request-id", b"mine")],
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    task = asyncio.create_task(server.app(scope, inbox.get, send))
    await until(lambda: len(server.backend.running) > 0)
    await until(lambda: len(sent) > chunks or not chunks)
    return task, sent, lambda: inbox.put_nowait({"type": "http.disconnect"})


async def fill(server: StubServer, http) -> list[asyncio.Task[httpx.Response]]:
    """Four requests that run until `hold` is set: all that the server lets in."""
    server.backend.hold.clear()
    running = [asyncio.create_task(http.post(COMPLETIONS, json=ASKED)) for _ in range(4)]
    await until(lambda: len(server.backend.running) == 4)
    return running


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chunks", [0, 3])
def test_a_client_that_hangs_up_ends_its_request(model, stream, chunks):
    async def story(server: StubServer, http):
        server.backend.outputs = ["word " * 100]
        if not chunks:
            server.backend.hold.clear()
        elif not stream:
            return  # there is nothing to see before the end
        task, sent, hang_up = await open_request(server, stream=stream, chunks=chunks)
        hang_up()
        await until(task.done)
        assert server.backend.running == {}
        assert json.loads(server.lines[-1])["status"] == 499

    run(model, story)


def test_an_administrator_ends_a_request(model):
    async def story(server: StubServer, http):
        server.backend.hold.clear()
        task, sent, _ = await open_request(server, stream=False)
        root = {"authorization": "Bearer root"}
        assert (await http.post("/admin/abort/other", headers=root)).status_code == 404
        assert (await http.post("/admin/abort/mine", headers=root)).json() == {"aborted": 1}
        await until(task.done)
        assert sent[0]["status"] == 499

    run(model, story, admin_keys=["root"])


@pytest.mark.parametrize("stream", [True, False])
def test_time_is_limited(model, stream):
    async def story(server: StubServer, http):
        watch = asyncio.create_task(server.service.watch_deadlines())
        server.backend.hold.clear()
        asked = {"model": "stub", "prompt": "hi", "stream": stream}
        answer = await http.post(COMPLETIONS, json=asked, headers={"x-request-timeout": "0.05"})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        assert "0.05 s" in answer.json()["error"]["message"]
        for bad in ("soon", "-1", "nan", "1e9"):
            refused = await http.post(COMPLETIONS, json=asked, headers={"x-request-timeout": bad})
            assert refused.status_code == 400
        watch.cancel()

    run(model, story)


def test_a_rank_that_refuses_is_a_bad_request(model):
    async def story(server: StubServer, http):
        server.backend.refuse = "unified: no such schema"
        answer = await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi", "stream": True})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "unified: no such schema"

    run(model, story)


def test_a_stream_that_fails_says_so(model):
    async def story(server: StubServer, http):
        server.backend.outputs = ["word " * 60]
        task, sent, _ = await open_request(server, stream=True, chunks=3)
        server.service.fail_all(stub.shutting_down())
        await until(task.done)
        assert b'"code":"shutting_down"' in sent[-1]["body"]
        assert b"[DONE]" not in sent[-1]["body"]
        assert sent[-1]["more_body"] is False

    run(model, story)


def test_too_many_requests_are_told_when_to_come_back(model):
    async def story(server: StubServer, http):
        waiting = await fill(server, http)
        answer = await http.post(COMPLETIONS, json=ASKED)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        urgent = asyncio.create_task(http.post(COMPLETIONS, json={**ASKED, "priority": -1}))
        await until(lambda: any(w.done() for w in waiting))
        server.backend.hold.set()
        statuses = sorted([(await w).status_code for w in waiting] + [(await urgent).status_code])
        assert statuses == [200, 200, 200, 200, 429]

    run(model, story, queue=2)


@pytest.mark.parametrize("asked", [{"n": 5}, {"prompt": ["ab"] * 5}])
def test_outputs_that_could_never_be_let_in_together_are_not_told_to_come_back(model, asked):
    async def story(server, http):
        answer = await http.post(
            COMPLETIONS, json={"model": "stub", "prompt": "hi", "max_tokens": 1, **asked}
        )
        assert answer.status_code == 400
        assert "retry-after" not in answer.headers
        assert answer.json()["error"]["param"] == "n"
        assert "5 outputs at once, at most 4 are let in" in answer.json()["error"]["message"]

    run(model, story, queue=2)


@pytest.mark.parametrize(
    ("asked", "grace", "why"), [(1, 0.05, "grace time of 0.05 s"), (2, 60.0, "told to stop now")]
)
def test_what_outlasts_the_grace_time_or_a_second_signal_is_told_so(model, asked, grace, why):
    async def story(server: StubServer, http):
        server.backend.outputs = ["word " * 60]
        streamed, sent, _ = await open_request(server, stream=True, chunks=3)
        server.backend.hold.clear()
        waiting = asyncio.create_task(http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"}))
        await until(lambda: len(server.backend.running) == 2)
        for _ in range(asked):
            server.ending.ask()
        await finish(server.service, server.ending, grace)
        await until(streamed.done)
        last = json.loads(sent[-1]["body"].rpartition(b"data: ")[2])
        assert last["error"]["code"] == "shutting_down"
        assert why in last["error"]["message"]
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")

    run(model, story)


def test_a_server_that_is_full_and_moves_experts_is_alive_and_ready(model):
    async def story(server: StubServer, http):
        running = await fill(server, http)
        for epoch in range(3):
            now = time.monotonic()
            moving = BalancingStatus(epoch=epoch, moves=9, moved_bytes=9, stall_seconds=epoch, aborted=0)
            server.service.metrics.board.observe(rank_status(0, now, running=4, balancing=moving), now)
            assert (await http.post(COMPLETIONS, json=ASKED)).status_code == 429
            assert (await http.get("/health")).json() == {"status": "ok", "silent": []}
            assert (await http.get("/ready")).status_code == 200
        assert b"moe_runtime_expert_moves_total" in (await http.get("/metrics")).content
        server.backend.hold.set()
        await asyncio.gather(*running)

    run(model, story, queue=2)


def test_a_rank_that_falls_silent_is_named(model, monkeypatch):
    async def story(server: StubServer, http):
        clock = [1000.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        assert (await http.get("/health")).json() == {"status": "ok", "silent": []}
        board = server.service.metrics.board
        board.observe(rank_status(0, 1020.0), 1020.0)
        clock[0] = 1049.0
        assert (await http.get("/health")).status_code == 200
        clock[0] = 1051.0
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()["silent"]) == (503, ["unified-0 rank 0"])

    async def go():
        server = stub.make_server(model)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=server.app), base_url="http://x"
        ) as http:
            await story(server, http)

    asyncio.run(go())


def test_draining(model):
    async def story(server: StubServer, http):
        assert (await http.get("/ready")).json() == {"status": "ready", "not_ready": []}
        server.backend.hold.clear()
        task, sent, _ = await open_request(server, stream=False)
        root = {"authorization": "Bearer root"}
        assert (await http.post("/admin/drain", headers=root)).json() == {"status": "draining", "running": 1}
        assert (await http.get("/ready")).status_code == 503
        refused = await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        server.backend.hold.set()
        await until(task.done)
        assert sent[0]["status"] == 200

    run(model, story, admin_keys=["root"])


def test_request_ids_are_echoed_and_may_be_equal(model):
    async def story(server: StubServer, http):
        asked, headers = {"model": "stub", "prompt": "hi"}, {"x-request-id": "same"}
        both = await asyncio.gather(*(http.post(COMPLETIONS, json=asked, headers=headers) for _ in range(2)))
        assert [(a.status_code, a.headers["x-request-id"]) for a in both] == [(200, "same")] * 2
        odd = await http.post(COMPLETIONS, json=asked, headers={"x-request-id": "a b"})
        assert odd.headers["x-request-id"].startswith("req-")
        line = json.loads(server.lines[0])
        assert (line["request_id"], line["status"], line["finish"]) == ("same", 200, "stop")

    run(model, story)


def test_spans_continue_the_callers_trace(model, monkeypatch):
    started: list[tuple] = []

    class Tracer:
        def start_span(self, name, context, attributes, **_):
            started.append((name, trace.get_current_span(context).get_span_context().trace_id, attributes))
            return trace.INVALID_SPAN

    monkeypatch.setattr(trace, "get_tracer", lambda name: Tracer())

    async def story(server: StubServer, http):
        headers = {"traceparent": f"00-{0xABC:032x}-{1:016x}-01"}
        await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"}, headers=headers)
        ((name, trace_id, attributes),) = started
        assert (name, trace_id) == ("POST /v1/completions", 0xABC)
        assert attributes["moe_runtime.output_tokens"] > 0

    run(model, story)


def test_metrics_count_what_clients_saw(model):
    async def story(server: StubServer, http):
        await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi", "max_tokens": 2, "n": 2})
        await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi", "max_tokens": 0})
        text = (await http.get("/metrics")).text
        assert 'moe_runtime_requests_total{finish_reason="length",frontend="0"} 2.0' in text
        assert 'moe_runtime_time_to_first_token_seconds_count{frontend="0"} 2.0' in text
        assert 'moe_runtime_inter_token_latency_seconds_count{frontend="0"} 2.0' in text

    run(model, story)
