"""How the tests of the API talk to a server in process: over HTTP, or with the official client."""

import asyncio
import json

import httpx
import openai

from tests.frontend.server import stub

HI = [{"role": "user", "content": "hi"}]


def run(model, story, **options):
    """Run `await story(server, http)` against a fresh server."""

    async def go():
        server = stub.make_server(model, **options)
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await asyncio.wait_for(story(server, http), 20)
        assert server.backend.running == {}
        assert server.service.num_requests == 0
        assert server.service.admission.num_requests == 0

    asyncio.run(go())


def talk(model, story, **options):
    """The same with the official client."""

    async def go(server, http):
        client = openai.AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http, max_retries=0)
        await story(server, client)

    run(model, go, **options)


def events(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def until(condition, seconds: float = 5.0) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")
