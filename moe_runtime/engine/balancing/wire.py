"""What ranks and frontends tell each other of expert loads, placements and reloads: typed msgpack, no torch.

Arrays travel as the bytes of their C order. L MoE layers, E experts, S slots, M moves.
"""

from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.placement import Placement
from moe_runtime.placement.stages import starts_by_slot


def moves_from(data: bytes) -> NDArray[np.int64]:
    """int64 [3, M] of the bytes of moves: layer, slot to fill, slot to copy from."""
    return np.frombuffer(data, np.int64).reshape(3, -1)


class WindowLoads(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> rank 0: what it counted in window number `window`.

    pairs           int64 [L, E]: (token, expert) pairs of real tokens that this rank routed
    received        int32 [steps, L]: pairs that its slots received in each step of the window
    expert_seconds  that it spent in expert compute
    """

    rank: int
    window: int
    pairs: bytes
    received: bytes
    expert_seconds: float


class NewPlacement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 -> rank: go from the placement with digest `base` to this one.

    attempt   a number that no other attempt of the instance has, growing
    slots     int32 [L, S] of the target, `starts` its uint16 [L, S] of split weights, `digest` of both
    moves     int64 [3, M]: layer, slot to fill, slot of the base placement to copy from
    """

    attempt: int
    base: str
    digest: str
    slots: bytes
    starts: bytes
    moves: bytes

    @classmethod
    def of(
        cls, attempt: int, current: Placement, target: Placement, moves_3M: NDArray[np.int64]
    ) -> "NewPlacement":
        return cls(
            attempt=attempt,
            base=current.digest,
            digest=replace(target, epoch=current.epoch + 1).digest,
            slots=target.slot_to_expert_LS.tobytes(),
            starts=starts_by_slot(target).tobytes(),
            moves=moves_3M.tobytes(),
        )

    def target(self, current: Placement) -> Placement:
        """The placement, in the sizes of the current one; ValueError if it arrived damaged."""
        shape = current.slot_to_expert_LS.shape
        target = Placement(
            slot_to_expert_LS=np.frombuffer(self.slots, np.int32).reshape(shape),
            num_experts=current.num_experts,
            num_ranks=current.num_ranks,
            epoch=current.epoch + 1,
            cumulative_LS=np.frombuffer(self.starts, np.uint16).reshape(shape),
            topology=current.topology,
        )
        if target.digest != self.digest:
            raise ValueError(f"a placement with digest {target.digest} arrived for {self.digest}")
        return target

    @property
    def moves_3M(self) -> NDArray[np.int64]:
        return moves_from(self.moves)


class Rebalance(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank 0: solve now and move, whether it pays or not."""


class AskPlacement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank 0: send a PlacementNow."""

    frontend: int


class PlacementNow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 -> frontend: the placement in use, what was decided last, and whose weights the slots hold.

    weights            the checkpoint of the last reload; empty: the plan's
    live               the instance rebalances
    action, why        of the newest decision; empty before the first
    moves              of the newest decision that had any: [layer, slot to fill, slot it comes from]
    balancedness       that the newest decision predicted, a mean over the layers
    bound, gap         mean over the layers: the highest balancedness that is possible at all, and the
                       distance of the plan's peak to the bound
    """

    instance: str
    epoch: int
    digest: str
    num_ranks: int
    slot_to_expert: list[list[int]]
    weights: str = ""
    live: bool = False
    action: str = ""
    why: str = ""
    moves: list[list[int]] = []
    balancedness: float | None = None
    bound: float | None = None
    gap: float | None = None


class RecordLoads(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: count from zero, keep the count as it is, or send it (as RecordedLoads)."""

    frontend: int
    action: Literal["start", "stop", "dump"]


class RecordedLoads(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: int64 [L, E] pairs that this rank routed while it recorded, of `layers` by number."""

    instance: str
    deployment: str
    rank: int
    layers: list[int]
    pairs: bytes


ReloadState = Literal["staged", "in use", "failed"]


class Reload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: read the weights of a checkpoint, and say when that is done.

    version  a number that no other reload of the launch has, above all tickets of moves (`engine.agree`)
    """

    frontend: int
    version: int
    path: str


class FinishReload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> rank: all ranks have read the weights, use them; or, with `commit` False, drop them."""

    version: int
    commit: bool
    why: str = ""


class ReloadAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank -> frontend: the weights are read, in use, or dropped; `why`, unless another rank failed."""

    instance: str
    rank: int
    version: int
    state: ReloadState
    why: str = ""


class BalancingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How balancing goes on one rank, since the start unless said otherwise.

    epoch              of the placement in use
    moves              slots filled on this rank; `moved_bytes` came in for them
    stall_seconds      that the step loop spent on balancing itself
    aborted            attempts rolled back
    stalled            decisions are overdue (rank 0)
    decided_seconds    since the newest decision, or the start (rank 0)
    balancedness       mean rank load / max rank load of the steps of the newest window: mean and 5th
    balancedness_p5    percentile over the steps (rank 0; 1 before the first window)
    slot_skew          load of the hottest slot / mean slot, mean over the layers, newest window (rank 0)
    """

    epoch: int
    moves: int
    moved_bytes: int
    stall_seconds: float
    aborted: int
    stalled: bool = False
    decided_seconds: float = 0.0
    balancedness: float = 1.0
    balancedness_p5: float = 1.0
    slot_skew: float = 1.0


ToRankBalancing = WindowLoads | NewPlacement | Rebalance | AskPlacement | RecordLoads | Reload | FinishReload
ToFrontendBalancing = PlacementNow | RecordedLoads | ReloadAnswer
