"""The part of RUN.json that says where time went and how a run changed over time; see schema.py.

Everything here is explained in docs/report.md. Simulated runs have all of it, measured ones what they can.
"""

from typing import Literal

import msgspec


class TimeShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one kind, and their share of the whole."""

    name: str
    seconds: float
    share: float


class TimeUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wall time of an instance in the window, told twice: `parts` and `bounds` each sum to `seconds`.

    roofline   ideal seconds of the steps / their seconds
    """

    instance: str
    seconds: float
    parts: tuple[TimeShare, ...]
    bounds: tuple[TimeShare, ...]
    roofline: float | None


class Attribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the wall time of a deployment went: `total` is the sum of its instances."""

    total: TimeUse
    instances: tuple[TimeUse, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment over the whole run, in buckets of equal length from the first scheduled arrival on.

    One value per bucket in each column. Null in a column: no step ran in the bucket, or it was not counted.
    """

    bucket_seconds: float
    prefill_tokens_per_second: tuple[float, ...]
    decode_rows_per_second: tuple[float, ...]
    batch: tuple[float | None, ...]
    kv_fraction: tuple[float | None, ...]
    balancedness: tuple[float | None, ...]
    step_fill: tuple[float | None, ...]
    active_fraction: tuple[float, ...]
    queue: tuple[float, ...]


class RankLoads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load of every rank of an instance over its layer's mean, `[layer][rank]`, layers as in `balancedness`.

    before, after  experts were balanced: under the oldest and the newest placement
    """

    instance: str
    before: tuple[tuple[float, ...], ...] | None
    after: tuple[tuple[float, ...], ...]


Outcome = Literal["done", "dropped", "failed", "unfinished"]


class Rebalance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision to change where the experts of an instance are, or how replicas share, and what came of it.

    reason   of the decision; `why` it ended otherwise than planned, else empty
    balancedness_before, _after  mean over layers of the loads in force then, under both placements
    balancedness_predicted       that the balancer, who knows those loads by counting, expected afterwards
    seconds  from the decision to the end
    """

    instance: str
    decided: float
    action: Literal["resplit", "move"]
    reason: str
    moves: int
    moved_bytes: int
    balancedness_before: float
    balancedness_after: float
    balancedness_predicted: float
    outcome: Outcome
    why: str
    seconds: float


class Balancing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the balancers of a deployment decided in the whole run; `waits` of the `decisions`: to stay."""

    decisions: int
    waits: int
    late_windows: int
    rebalances: tuple[Rebalance, ...]


class Simulation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a simulated run assumed besides the plan."""

    balance: str
    weights: str
    events: str | None
    virtual_seconds: float
