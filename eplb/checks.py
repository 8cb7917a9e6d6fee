"""What a call of `solve` may be given, with an error that names what it was given instead."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_runtime.eplb.effort import EFFORTS
from moe_runtime.eplb.errors import BalanceError
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.topology import Topology

MOST_SLOTS = 1 << 20


def check_sizes(
    load: NDArray[np.float64], topology: Topology, slots: int, groups: int, current: Placement | None
) -> None:
    """Raise BalanceError for sizes that cannot be, or a current placement of other ones."""
    L, E = load.shape
    if slots < E:
        raise BalanceError(f"slots = {slots} cannot hold {E} experts; {E} is the least")
    if slots > MOST_SLOTS:
        raise BalanceError(f"slots = {slots}: at most {MOST_SLOTS} are possible")
    if groups < 1 or E % groups:
        raise BalanceError(f"groups = {groups} must divide the {E} experts")
    if current is None:
        return
    width = topology.slots_per_rank(slots) * topology.num_ranks
    for what, have, want in (
        ("layers", current.num_layers, L),
        ("experts", current.num_experts, E),
        ("ranks", current.num_ranks, topology.num_ranks),
        ("slots (surplus ones included)", current.num_slots, width),
    ):
        if have != want:
            raise BalanceError(f"the current placement has {have} {what}, the task {want}")


def check_settings(
    horizon: float | None,
    expert_bytes: float,
    uncertainty: ArrayLike,
    min_gain: float,
    next_error: float,
    quality: str,
    split: str,
    num_layers: int,
) -> None:
    """Raise BalanceError for a setting outside its range."""
    if quality not in EFFORTS:
        raise BalanceError(f"quality = {quality!r}: one of {', '.join(EFFORTS)}")
    if split not in ("weighted", "equal"):
        raise BalanceError(f"split = {split!r}: weighted or equal")
    for name, value in (
        ("horizon", horizon),
        ("expert_bytes", expert_bytes),
        ("min_gain", min_gain),
        ("next_error", next_error),
    ):
        if value is not None and not (np.isfinite(value) and value >= 0):
            raise BalanceError(f"{name} = {value}: must be a finite number >= 0")
    error = np.asarray(uncertainty, np.float64)
    if error.shape not in ((), (num_layers,)) or not (np.isfinite(error) & (error >= 0)).all():
        raise BalanceError(
            f"uncertainty = {uncertainty!r}: one number >= 0, or one for each of {num_layers} layers"
        )
