"""Promises: what a rank has said it will serve, in tokens and requests, and whether there is room for more.
Pure.

Several frontends choose a rank without knowing of each other. What each believes of the rank's load is
a hint; the rank's own count, which no two of them can raise at once, is the truth.
"""

from dataclasses import dataclass, field

# What waits at a rank may be as much as what runs there.
QUEUE_SHARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The most that a rank promises: tokens of prompts and requested outputs, and requests (None: any)."""

    tokens: int
    requests: int | None


def room_of(deployment: str, *, kv_tokens: int, max_sequences: int) -> Room:
    """What a rank may promise: what its cache holds and its batch runs, and as much again that waits.

    Who only runs prompts is not bound by the size of its batch: a request is there for moments, and holds
    its place on a rank that decodes all the while.
    """
    return Room(
        tokens=QUEUE_SHARE * kv_tokens,
        requests=None if deployment == "prefill" else QUEUE_SHARE * max_sequences,
    )


@dataclass(slots=True)
class Promises:
    """The requests that one rank has promised to serve, by id, with their tokens."""

    room: Room
    _tokens: dict[int, int] = field(default_factory=dict)
    _total: int = 0

    @property
    def tokens(self) -> int:
        """Tokens promised."""
        return self._total

    @property
    def requests(self) -> int:
        """Requests promised."""
        return len(self._tokens)

    def fits(self, tokens: int, *, held: int = 0) -> bool:
        """One more request may be promised. `held`: tokens of ended requests that still fill the cache."""
        requests = self.room.requests
        return self._total + held + tokens <= self.room.tokens and (
            requests is None or len(self._tokens) < requests
        )

    def add(self, request: int, tokens: int) -> None:
        """Promise to serve a request; the number of its tokens may be corrected later."""
        self.end(request)
        self._tokens[request] = tokens
        self._total += tokens

    def end(self, request: int) -> None:
        """The request is over, or was given up; unknown ids are ignored."""
        self._total -= self._tokens.pop(request, 0)

    def __contains__(self, request: int) -> bool:
        return request in self._tokens

    def besides(self, frontend: int, shift: int) -> tuple[int, int]:
        """Tokens and requests promised to other frontends than this one; ids are `frontend << shift | n`."""
        others = [tokens for request, tokens in self._tokens.items() if request >> shift != frontend]
        return sum(others), len(others)
