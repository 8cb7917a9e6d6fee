"""What the dispatch backends can do: a table of limits, and the check of numbers against it.

A `hard` limit refuses the plan; beyond a `tested` one the plan runs with a warning that the
report carries. DeepEP's rows are what the sources of version 2.1.0 assert; they are data that a
search for plans needs without the library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

LimitKind = Literal["hard", "tested"]
DispatchMode = Literal["normal", "low_latency"]
DISPATCH_MODES: tuple[DispatchMode, ...] = get_args(DispatchMode)
"""How the rows of a step travel: as many as there are, or into places of fixed shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound on one quantity of `DispatchSizes.quantities`. Unset bounds do not apply."""

    quantity: str
    kind: LimitKind = "hard"
    at_most: int | None = None
    multiple_of: int | None = None
    one_of: tuple[int, ...] | None = None
    why: str = ""

    def allows(self, value: int) -> bool:
        return (
            (self.at_most is None or value <= self.at_most)
            and (self.multiple_of is None or value % self.multiple_of == 0)
            and (self.one_of is None or value in self.one_of)
        )

    @property
    def text(self) -> str:
        """The bound in words: what would be allowed."""
        words = []
        if self.at_most is not None:
            words.append(f"at most {self.at_most}")
        if self.multiple_of is not None:
            words.append(f"a multiple of {self.multiple_of}")
        if self.one_of is not None:
            words.append("one of " + ", ".join(str(v) for v in self.one_of))
        return " and ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSizes:
    """What a backend is asked to carry.

    slots       physical experts of all ranks together (shared experts served as slots included)
    top_k       slots a token goes to (likewise)
    max_tokens  rows a rank sends per round
    row_bytes   bytes of one row as dispatched; DeepEP's rows count values only (`hidden` bytes: fp8)
    nodes       over which the ranks are spread
    """

    ranks: int
    slots: int
    hidden: int
    top_k: int
    max_tokens: int
    row_bytes: int
    nodes: int = 1

    @property
    def quantities(self) -> dict[str, int]:
        return {
            "ranks": self.ranks,
            "slots": self.slots,
            "slots modulo ranks": self.slots % self.ranks,
            "slots per rank": -(-self.slots // self.ranks),
            "hidden": self.hidden,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "ranks x max_tokens": self.ranks * self.max_tokens,
            "row bytes": self.row_bytes,
            "hidden in fp8": self.hidden if self.row_bytes == self.hidden else 0,
            "nodes": self.nodes,
            "ranks per node": -(-self.ranks // self.nodes),
            "nodes beyond one per 8 ranks": self.nodes - -(-self.ranks // 8),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A limit that sizes break."""

    limit: Limit
    value: int

    @property
    def message(self) -> str:
        why = f" ({self.limit.why})" if self.limit.why else ""
        return f"{self.limit.quantity} = {self.value} must be {self.limit.text}{why}"


_LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
DOCUMENTED_LOW_LATENCY_TOKENS = 255
"""DeepEP's documentation says to stay below 256."""

_NORMAL_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_EVEN_SLOTS = Limit(quantity="slots modulo ranks", at_most=0, why="every rank holds as many slots")
_FP8_SCALES = Limit(quantity="hidden in fp8", multiple_of=128, why="one scale per 128 values")

LIMITS: Mapping[str, tuple[Limit, ...]] = MappingProxyType(
    {
        "local": (Limit(quantity="ranks", at_most=1, why="it has no transport"),),
        "torch": (
            Limit(
                quantity="ranks",
                kind="tested",
                at_most=8,
                why="what the test suite runs, over gloo on one host",
            ),
        ),
        "shm": (
            Limit(quantity="nodes", at_most=1, why="its ranks share memory"),
            Limit(quantity="slots per rank", at_most=65536),
            Limit(quantity="ranks", kind="tested", at_most=8, why="what the test suite runs"),
        ),
        "deepep_normal": (
            Limit(
                quantity="ranks",
                one_of=_NORMAL_RANKS,
                why="within a node of 8, or nodes with a tuned configuration",
            ),
            Limit(
                quantity="nodes beyond one per 8 ranks",
                at_most=0,
                why="ranks 8n to 8n + 7 are joined by NVLink",
            ),
            _EVEN_SLOTS,
            Limit(quantity="slots per rank", at_most=1024),
            Limit(quantity="top_k", at_most=32),
            Limit(quantity="row bytes", multiple_of=16),
            _FP8_SCALES,
        ),
        "deepep_low_latency": (
            Limit(
                quantity="ranks",
                one_of=(*range(1, 8), *range(8, 1025, 8)),
                why="below 8, or whole nodes of 8",
            ),
            Limit(quantity="ranks", kind="tested", at_most=256),
            _EVEN_SLOTS,
            Limit(quantity="slots per rank", at_most=1024),
            Limit(quantity="slots", kind="tested", at_most=14 * 132, why="14 per SM of a GPU with 132 SMs"),
            Limit(quantity="hidden", one_of=_LOW_LATENCY_HIDDEN, why="kernels are compiled per size"),
            Limit(quantity="top_k", at_most=11),
            Limit(quantity="ranks x max_tokens", multiple_of=4),
            Limit(quantity="max_tokens", at_most=511, why="NVSHMEM_QP_DEPTH 1024 / 2 - 1"),
            Limit(
                quantity="max_tokens",
                kind="tested",
                at_most=DOCUMENTED_LOW_LATENCY_TOKENS,
                why="the documentation says below 256",
            ),
        ),
        "deepep_elastic": (
            Limit(quantity="ranks", at_most=1024),
            Limit(quantity="slots", at_most=2048),
            _EVEN_SLOTS,
            Limit(quantity="slots per rank", at_most=256),
            Limit(quantity="top_k", at_most=32),
            Limit(quantity="hidden", multiple_of=256, why="combine"),
            Limit(quantity="row bytes", multiple_of=32),
            Limit(quantity="nodes", at_most=32, why="scale-out domain"),
            Limit(quantity="ranks per node", at_most=64, why="scale-up domain"),
            _FP8_SCALES,
        ),
    }
)


def violations(backend: str, sizes: DispatchSizes) -> tuple[Violation, ...]:
    """The limits of a backend that `sizes` break, in table order. KeyError for an unknown backend."""
    values = sizes.quantities
    return tuple(
        Violation(limit=limit, value=values[limit.quantity])
        for limit in LIMITS[backend]
        if not limit.allows(values[limit.quantity])
    )
