"""An instance whose experts move all the time: targets of every kind, and proof of what slots hold."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from moe_runtime.engine.balancing.agent import Balancing
from moe_runtime.engine.rank import RankEngine
from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.topology import Topology
from tests.engine.instance import Driven, Files

EXTRA = 4


def rearranged(current: Placement, kind: str, rng: np.random.Generator) -> Placement:
    """A random target of a kind: `permute` or `back` (every expert once), `extra` (4 more replicas)."""
    L, R, n = current.num_layers, current.num_ranks, current.slots_per_rank
    table = np.full((L, R * n), -1, np.int32)
    for layer in range(L):
        held: list[list[int]] = [[] for _ in range(R)]
        hot = rng.choice(current.num_experts, EXTRA, replace=False).tolist() if kind == "extra" else []
        for expert in [*hot, *rng.permutation(current.num_experts).tolist()]:
            free = [r for r in range(R) if len(held[r]) < n and expert not in held[r]]
            held[min(free, key=lambda r: (len(held[r]), rng.random()))].append(expert)
        for rank, mine in enumerate(held):
            table[layer, rank * n + rng.permutation(n)[: len(mine)]] = rng.permutation(mine)
    return Placement(slot_to_expert_LS=table, num_experts=current.num_experts, num_ranks=R)


def balancing_of(driven: Driven) -> Balancing:
    balancing = driven.engine.balancing
    assert balancing is not None
    return balancing


@dataclass
class Forced:
    """Makes every rank check its slots in every step, and rank 0 start the next rebalance as one has ended.

    `truth[layer][expert]` is the checksum of the expert's tensors; `wrong` has a line per slot that differs,
    `epochs` the placement's epoch after each step.
    """

    driven: Driven
    truth: list[dict[int, str]]
    on: bool = False
    epochs: dict[int, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    begun: int = 0
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def install(self) -> None:
        """From now on the engine's steps do so."""
        step: Callable[[RankEngine], object] = RankEngine.step
        forced = self

        def checked(engine: RankEngine) -> object:
            forced.next_target()
            result = step(engine)
            forced.check()
            return result

        setattr(RankEngine, "step", checked)  # noqa: B010

    def next_target(self) -> None:
        balancing = balancing_of(self.driven)
        controller = balancing.controller
        if not self.on or controller is None or balancing.busy:
            return
        kind = ("permute", "extra", "back")[self.begun % 3]
        self.begun += 1
        current = balancing.mover.placement
        target = rearranged(current, kind, self._random)
        controller.move_to(target, moves(current, target), time.monotonic())

    def check(self) -> None:
        mover = balancing_of(self.driven).mover
        placement, step = mover.placement, self.driven.engine.step_number
        self.epochs[step - 1] = placement.epoch
        for layer, truth in enumerate(self.truth):
            for slot, expert in enumerate(placement.local_experts(layer, mover.rank).tolist()):
                if expert >= 0 and mover.registry.checksum(layer, slot) != truth[expert]:
                    self.wrong.append(f"step {step}, layer {layer}, slot {slot}: not expert {expert}")


def moves(current: Placement, target: Placement) -> np.ndarray:
    plan = plan_migration(current, target, Topology(nodes=1, ranks_per_node=current.num_ranks))
    return np.stack([plan.layer_M, plan.slot_M, plan.source_M])


def checksums(driven: Driven, name: str = "truth") -> list[dict[int, str]]:
    """COLLECTIVE: of every expert's tensors, per layer, as the ranks have loaded them."""
    mover = balancing_of(driven).mover
    mine = [
        {
            expert: mover.registry.checksum(layer, slot)
            for slot, expert in enumerate(mover.placement.local_experts(layer, mover.rank).tolist())
            if expert >= 0
        }
        for layer in range(mover.placement.num_layers)
    ]
    texts = Files(driven.rank, name).gather("checksums", msgspec.json.encode(mine).decode())
    parts = [msgspec.json.decode(text, type=list[dict[int, str]]) for text in texts]
    return [{e: c for part in parts for e, c in part[layer].items()} for layer in range(len(mine))]


@torch.inference_mode()
def drain(driven: Driven, *, steps: int = 400) -> None:
    """COLLECTIVE: step until no expert is on the move; every rank takes as many."""
    files = Files(driven.rank, f"drain{driven.engine.step_number}")
    start = driven.engine.step_number
    while driven.engine.step_number < start + steps:
        driven.engine.step()
    assert files.gather("busy", str(balancing_of(driven).busy)) == ["False"] * driven.rank.num_ranks


def prompts(rank: int, count: int, vocabulary: Sequence[int]) -> list[list[int]]:
    """Different ones on each rank, some longer than a chunk."""
    rng = np.random.default_rng(rank)
    return [rng.choice(vocabulary, rng.integers(3, 30)).tolist() for _ in range(count)]
