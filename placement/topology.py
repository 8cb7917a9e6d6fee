"""Topology: nodes and their ranks, what the links between them cost, how slots spread over ranks.

Numbers only: it knows nothing of devices, addresses or experts. Ranks are numbered node by node.
"""

import re
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_runtime.placement.errors import TopologyError

MOST_RANKS = 65_536
LINK_CLASSES = ("same_rank", "same_node", "other_node")
# A copy inside a GPU's memory, NVLink as DeepEP measures it on H800, a 400 Gb/s port per GPU.
DEFAULT_SECONDS_PER_BYTE = (1 / 1.2e12, 1 / 160e9, 1 / 50e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`nodes` machines of `ranks_per_node` ranks.

    seconds_per_byte  of a transfer between slots of the same rank, of two ranks of a node, of two
                      nodes: what the balancer weighs moves with. Must not fall.

    Raises TopologyError for sizes under 1 and for costs that are negative, not finite or falling.
    """

    nodes: int
    ranks_per_node: int
    seconds_per_byte: tuple[float, float, float] = DEFAULT_SECONDS_PER_BYTE

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise TopologyError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.num_ranks > MOST_RANKS:
            raise TopologyError(f"{self}: {self.num_ranks} ranks; at most {MOST_RANKS} are possible")
        cost = self.seconds_per_byte
        if len(cost) != 3 or not np.isfinite(cost).all() or cost[0] < 0 or sorted(cost) != list(cost):
            raise TopologyError(
                f"seconds_per_byte = {cost}: three costs >= 0, not falling, for {', '.join(LINK_CLASSES)}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """`"4x8"`: 4 nodes of 8 ranks."""
        match = re.fullmatch(r"\s*(\d+)\s*[xX]\s*(\d+)\s*", text)
        if not match:
            raise TopologyError(
                f"topology {text!r}: write NODESxRANKS, as in 4x8 for 4 nodes of 8 ranks each"
            )
        return cls(nodes=int(match[1]), ranks_per_node=int(match[2]))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def slots_per_rank(self, slots: int) -> int:
        """Slots every rank has when `slots` are to be filled: the last of some ranks stays empty."""
        return -(-slots // self.num_ranks)

    def surplus_slots(self, slots: int) -> int:
        """Slots that exist but stay empty (-1), as every rank has the same number of them."""
        return self.slots_per_rank(slots) * self.num_ranks - slots

    def node_of(self, rank: ArrayLike) -> NDArray[np.int64]:
        """Node of each rank, int64, shaped like `rank`."""
        return np.asarray(rank, dtype=np.int64) // self.ranks_per_node

    def link_class(self, source: ArrayLike, target: ArrayLike) -> NDArray[np.int64]:
        """Index into LINK_CLASSES of a transfer between ranks, int64, broadcast over both."""
        a, b = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
        return np.where(a == b, 0, np.where(self.node_of(a) == self.node_of(b), 1, 2))

    def seconds(self, source: ArrayLike, target: ArrayLike, num_bytes: float) -> NDArray[np.float64]:
        """Seconds of one transfer of `num_bytes` between ranks, nothing else going on."""
        return np.asarray(self.seconds_per_byte)[self.link_class(source, target)] * num_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "seconds_per_byte": list(self.seconds_per_byte),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(
            nodes=int(data["nodes"]),
            ranks_per_node=int(data["ranks_per_node"]),
            seconds_per_byte=tuple(float(c) for c in data["seconds_per_byte"]),  # type: ignore[arg-type]
        )
