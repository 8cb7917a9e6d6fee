"""How the ranks of an instance reach each other for step agreement: a window, or windows and a tree."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from moe_runtime.engine.exchange import Exchange, LocalExchange, SharedExchange
from moe_runtime.engine.node_exchange import NodeExchange
from moe_runtime.engine.node_tree import NodeTree
from moe_runtime.launch.place import Place
from moe_runtime.launch.rendezvous import opening
from moe_runtime.shared_memory import Window, WindowAddress


class AgreementAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's leader publishes: the node's window, and with more nodes where its tree listens."""

    window: WindowAddress
    tree: tuple[str, int] | None = None


@dataclass(slots=True)
class Agreement:
    """A rank's end of it before the others are known; must live until all have opened the window."""

    place: Place
    timeout: float
    _window: Window | None = None
    _tree: NodeTree | None = None

    def open(self) -> AgreementAddress | None:
        """LOCAL: what leaders publish; None for other ranks, and where there is nobody to ask."""
        place = self.place
        if not place.leads or place.num_ranks == 1:
            return None
        if len(place.nodes) == 1:
            self._window = SharedExchange.create_window(place.num_ranks)
            return AgreementAddress(window=self._window.address)
        self._window = NodeExchange.create_window(place.nodes, place.node)
        self._tree = NodeExchange.make_tree(place.nodes, place.node, timeout=self.timeout)
        return AgreementAddress(window=self._window.address, tree=self._tree.listen())

    def connect(self, leaders: Sequence[AgreementAddress | None]) -> Exchange:
        """COLLECTIVE: `leaders` are the addresses that the leaders published, by node.

        PeerLost, or StepTimeout between nodes, names a leader that is gone or late.
        """
        place = self.place
        address = leaders[place.node]
        if address is None:
            return LocalExchange()
        if self._tree is not None:
            self._tree.connect([a.tree for a in leaders if a is not None and a.tree is not None])
        rank, timeout = place.rank, self.timeout
        with opening("agreement window", place.here.start):
            if len(place.nodes) == 1:
                return SharedExchange.open(
                    address.window, rank=rank, num_ranks=place.num_ranks, timeout=timeout
                )
            return NodeExchange.open(
                address.window, rank=rank, nodes=place.nodes, timeout=timeout, tree=self._tree
            )
