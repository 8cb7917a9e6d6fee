"""Peers: the frontends of a launch among each other. What one is asked about all of them, it asks the others.

Owns the two messages and the waiting; how they travel, and what the answers mean, is the caller's business.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import msgspec

PATIENCE_SECONDS = 2.0


class PeerAsk(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> frontend: a question, answered to `frontend`."""

    frontend: int
    number: int
    about: str
    text: str


class PeerAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> frontend: what the one with this number says to a question."""

    frontend: int
    number: int
    body: bytes


PeerMessage = PeerAsk | PeerAnswer
Handler = Callable[[str], bytes]


class Peers:
    """One of several frontends. `send` takes the number of another one and a message for it."""

    def __init__(self, number: int, others: Sequence[int], send: Callable[[int, PeerMessage], None]) -> None:
        self.number = number
        self.others = tuple(others)
        self._send = send
        self._handlers: dict[str, Handler] = {}
        self._numbers = count()
        self._answers: dict[int, dict[int, bytes]] = {}
        self._complete: dict[int, asyncio.Event] = {}

    def on(self, about: str, handler: Handler) -> None:
        """Answer questions of this kind, this frontend's own among them, with what `handler` returns."""
        self._handlers[about] = handler

    async def ask(self, about: str, text: str = "") -> Mapping[int, bytes]:
        """The answers by frontend, this one's first; who says nothing for `PATIENCE_SECONDS` is left out."""
        number = next(self._numbers)
        answers = self._answers[number] = {}
        complete = self._complete[number] = asyncio.Event()
        for other in self.others:
            self._send(other, PeerAsk(frontend=self.number, number=number, about=about, text=text))
        own = self._handlers[about](text)
        try:
            if self.others:
                await asyncio.wait_for(complete.wait(), PATIENCE_SECONDS)
        except TimeoutError:
            pass
        finally:
            del self._answers[number], self._complete[number]
        return {self.number: own, **answers}

    def handle(self, message: PeerMessage) -> None:
        """Something came from another frontend. A question that nobody here can answer yet is dropped."""
        match message:
            case PeerAsk(frontend=frontend, number=number, about=about, text=text):
                handler = self._handlers.get(about)
                if handler is not None:
                    answer = PeerAnswer(frontend=self.number, number=number, body=handler(text))
                    self._send(frontend, answer)
            case PeerAnswer(frontend=frontend, number=number, body=body):
                answers = self._answers.get(number)
                if answers is not None:  # else it came too late
                    answers[frontend] = body
                    if len(answers) == len(self.others):
                        self._complete[number].set()
