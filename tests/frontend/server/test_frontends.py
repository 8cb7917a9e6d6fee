"""Several frontends behind one port: whichever is asked about all of them answers for all."""

import asyncio

import httpx

from moe_runtime.frontend import peers as peers_module
from moe_runtime.frontend.peers import PeerMessage
from tests.frontend.server import stub
from tests.frontend.server.client import until
from tests.frontend.server.corpus import COMPLETIONS
from tests.frontend.server.stub import StubServer

ROOT = {"authorization": "Bearer root"}
ASKED = {"model": "stub", "prompt": "hi"}


def run(model, story) -> None:
    """Run `await story(servers, clients)` with two frontends that hear each other."""

    async def go() -> None:
        servers: list[StubServer] = []

        def tell(number: int, message: PeerMessage) -> None:
            asyncio.get_running_loop().call_soon(lambda: servers[number].peers.handle(message))

        for number in range(2):
            options = {"number": number, "others": (1 - number,), "tell": tell, "admin_keys": ["root"]}
            servers.append(stub.make_server(model, **options))
        clients = [
            httpx.AsyncClient(transport=httpx.ASGITransport(app=s.app), base_url="http://test")
            for s in servers
        ]
        await asyncio.wait_for(story(servers, clients), 20)
        assert [s.service.num_requests for s in servers] == [0, 0]
        for client in clients:
            await client.aclose()

    asyncio.run(go())


async def held(server: StubServer, client: httpx.AsyncClient, name: str) -> "asyncio.Task[httpx.Response]":
    """A request that runs until `backend.hold` is set."""
    server.backend.hold.clear()
    before = server.service.num_requests
    task = asyncio.create_task(client.post(COMPLETIONS, json=ASKED, headers={"x-request-id": name}))
    await until(lambda: server.service.num_requests == before + 1)
    return task


def test_an_abort_reaches_the_frontends_that_have_the_request(model):
    async def story(servers, clients):
        mine = await held(servers[1], clients[1], "mine")
        same = [await held(servers[n], clients[n], "same") for n in range(2)]
        assert (await clients[0].post("/admin/abort/mine", headers=ROOT)).json() == {"aborted": 1}
        assert (await mine).status_code == 499
        assert (await clients[1].post("/admin/abort/same", headers=ROOT)).json() == {"aborted": 2}
        assert [(await one).status_code for one in same] == [499, 499]
        assert (await clients[0].post("/admin/abort/mine", headers=ROOT)).status_code == 404

    run(model, story)


def test_draining_one_drains_all(model):
    async def story(servers, clients):
        running = await held(servers[1], clients[1], "running")
        answer = await clients[0].post("/admin/drain", headers=ROOT)
        assert answer.json() == {"status": "draining", "running": 1}
        assert [s.ending.asked for s in servers] == [1, 1]
        assert [(await c.post(COMPLETIONS, json=ASKED)).status_code for c in clients] == [503, 503]
        servers[1].backend.hold.set()
        assert (await running).status_code == 200

    run(model, story)


def test_a_scrape_of_either_has_the_requests_of_both(model, monkeypatch):
    async def story(servers, clients):
        for client, number in zip(clients, (1, 2), strict=True):
            for _ in range(number):
                await client.post(COMPLETIONS, json={**ASKED, "max_tokens": 2})
        first, second = [(await client.get("/metrics")).text for client in clients]
        for text in (first, second):
            for frontend, number in (("0", 1), ("1", 2)):
                labels = f'finish_reason="length",frontend="{frontend}"'
                assert f"moe_runtime_requests_total{{{labels}}} {number}.0" in text
                seen = f'moe_runtime_time_to_first_token_seconds_count{{frontend="{frontend}"}} {number}.0'
                assert seen in text
            assert text.count("# TYPE moe_runtime_requests_total counter") == 1
        monkeypatch.setattr(peers_module, "PATIENCE_SECONDS", 0.05)
        servers[1].peers._handlers.clear()
        alone = (await clients[0].get("/metrics")).text
        assert 'moe_runtime_frontend_up{frontend="1"} 0.0' in alone
        assert 'moe_runtime_requests_total{finish_reason="length",frontend="0"} 1.0' in alone

    run(model, story)
