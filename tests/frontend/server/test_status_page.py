"""The status page says what the board knows, and nothing that a name could smuggle in."""

import asyncio
from html.parser import HTMLParser

import pytest

from moe_runtime.engine.messages import RankTotals
from moe_runtime.frontend.server.status_page import render_status
from tests.frontend.server import stub
from tests.frontend.server.stub import rank_status


class Balanced(HTMLParser):
    """Fails on a tag that is not closed; gathers text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def service(model):
    async def make():
        return stub.make_server(model)

    server = asyncio.run(make())
    board = server.service.metrics.board
    for rank in (0, 1):
        old = RankTotals(received_rows=[0], output_tokens=0)
        new = RankTotals(received_rows=[10 + 30 * rank], output_tokens=500)
        board.observe(rank_status(rank, 10.0, totals=old), 10.0)
        board.observe(rank_status(rank, 15.0, totals=new, running=3, waiting=2, waiting_tokens=1234), 15.0)
    return server


def shown(server, name: str, now: float = 15.0) -> str:
    page = render_status(name, server.service, now)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert "<script" not in page
    assert "http://" not in page
    assert 'name="viewport" content="width=device-width' in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<td ") == page.count("<td data-label=") > 0, "each cell can say its column's name"
    return parser.text


def test_numbers(service):
    text = shown(service, "model")
    for part in ("unified-0 rank 1", "ready", "2 (1,234 tokens)", "25 %", "100.0", "0.62"):
        assert part in text, part


def test_states(service):
    service.backend.missing = ["unified-0 rank 1"]
    assert "waiting for unified-0 rank 1" in shown(service, "<script>alert(1)</script>")
    service.backend.missing = []
    assert "silent: unified-0 rank 0, unified-0 rank 1" in shown(service, "model", now=60.0)
