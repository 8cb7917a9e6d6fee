"""What a run measures, as pure data: one record per request, one row per rank and step.

Owns the columns and their wire form; knows nothing of clocks, sockets or how a number was
taken. All times are seconds of one monotonic clock (one host). S steps, P phases, M MoE layers.

Not measured is not zero: a float column holds NaN and an integer column -1 where the engine
could not measure, and the report then says null with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import msgspec
import numpy as np
from numpy.typing import NDArray

PHASES = ("attention", "routing", "dispatch", "experts", "combine", "other", "waiting")
# Why a step ran as one or two micro-batches; the order is that of engine.agree.OverlapReason.
OVERLAP_REASONS = ("off", "asked", "gain", "no_gain", "too_small")
NOT_MEASURED = -1

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request of a trace, as its client saw it.

    index              line of the trace, from 0
    scheduled_arrival  when the trace wanted it sent; every latency counts from here
    sent               when it was really sent; None if it never was
    token_times        arrival of each output token, ascending
    prompt_tokens      length of the prompt
    cached_tokens      prompt tokens whose KV was found in a prefix cache
    output_tokens      tokens generated; equals len(token_times)
    finish_reason      stop, length or error
    error              why it failed; None if it did not
    prefill_instance   instance that produced the first token; None if none did
    decode_instance    instance that produced the others (the same one in a unified deployment)
    """

    index: int
    scheduled_arrival: float
    sent: float | None
    token_times: Sequence[float]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    error: str | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None


# The columns of RankSteps after `phases` and `received_rows`, which have a second axis.
_FLAT: dict[str, str] = {
    "step": "<i8",
    "start": "<f8",
    "wall": "<f8",
    "decode_tokens": "<i8",
    "prefill_tokens": "<i8",
    "cached_tokens": "<i8",
    "recomputed_tokens": "<i8",
    "kv_used_blocks": "<i8",
    "dispatch_mode": "<i8",
    "rows_dispatched": "<i8",
    "bytes_dispatched": "<i8",
    "bytes_combined": "<i8",
    "transport_busy": "<f8",
    "transport_waited": "<f8",
    "preemptions": "<i8",
    "micro_batches": "<i8",
    "overlap_reason": "<i8",
    "placement_epoch": "<i8",
}
_DTYPES: dict[str, str] = {**_FLAT, "phases": "<f8", "received_rows": "<i8"}
COLUMNS = tuple(_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The steps of one rank, in order, one array per column.

    instance           name of the instance, as `decode-0`
    deployment         prefill, decode or unified
    rank               rank within the instance
    step               int64 [S]: number of the step, the same on every rank of the instance
    start              float64 [S]: when the step began, seconds
    wall               float64 [S]: seconds the step took
    phases             float64 [S, P]: exclusive host seconds in PHASES, which sum to `wall`
    decode_tokens      int64 [S]: decode rows run
    prefill_tokens     int64 [S]: prompt tokens computed for the first time
    cached_tokens      int64 [S]: prompt tokens found in the prefix cache by requests admitted in this step
    recomputed_tokens  int64 [S]: prefill rows run again after a preemption (not in `prefill_tokens`)
    received_rows      int64 [S, M]: real (token, expert) pairs that this rank's slots received
    kv_used_blocks     int64 [S]: blocks of the primary group in use after the step
    dispatch_mode      int64 [S]: how rows travelled, as an index into DISPATCH_MODES
    rows_dispatched    int64 [S]: rows this rank sent to other ranks in dispatches, as they travel
    bytes_dispatched   int64 [S]: bytes this rank sent to other ranks in dispatches
    bytes_combined     int64 [S]: bytes this rank sent to other ranks in combines
    transport_busy     float64 [S]: seconds in which a transfer of this rank was under way
    transport_waited   float64 [S]: the part of it in which the rank stood still
    preemptions        int64 [S]: sequences preempted
    micro_batches      int64 [S]: 1 or 2
    overlap_reason     int64 [S]: why, as an index into OVERLAP_REASONS
    placement_epoch    int64 [S]: of the placement of experts that the step ran with
    """

    instance: str
    deployment: str
    rank: int
    step: I64
    start: F64
    wall: F64
    phases: F64
    decode_tokens: I64
    prefill_tokens: I64
    cached_tokens: I64
    recomputed_tokens: I64
    received_rows: I64
    kv_used_blocks: I64
    dispatch_mode: I64
    rows_dispatched: I64
    bytes_dispatched: I64
    bytes_combined: I64
    transport_busy: F64
    transport_waited: F64
    preemptions: I64
    micro_batches: I64
    overlap_reason: I64
    placement_epoch: I64

    def __post_init__(self) -> None:
        S = len(self.step)
        if self.phases.shape != (S, len(PHASES)):
            raise ValueError(f"phases have shape {self.phases.shape}, expected {(S, len(PHASES))}")
        if self.received_rows.ndim != 2 or len(self.received_rows) != S:
            raise ValueError(
                f"received_rows have shape {self.received_rows.shape}, expected [{S}, MoE layers]"
            )
        for name in _FLAT:
            shape = getattr(self, name).shape
            if shape != (S,):
                raise ValueError(f"{name} has shape {shape}, expected ({S},)")

    def __len__(self) -> int:
        return len(self.step)

    @property
    def end(self) -> F64:
        """float64 [S]: when each step ended."""
        return self.start + self.wall

    @property
    def num_moe_layers(self) -> int:
        return int(self.received_rows.shape[1])

    @property
    def tokens(self) -> I64:
        """int64 [S]: rows run in each step."""
        return self.decode_tokens + self.prefill_tokens + self.recomputed_tokens

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "RankSteps":
        """The steps that `rows` names: bool [S], or indices in the order wanted."""
        return _like(self, {name: getattr(self, name)[rows] for name in COLUMNS})


def _like(steps: RankSteps, columns: dict[str, NDArray[np.generic]]) -> RankSteps:
    return RankSteps(instance=steps.instance, deployment=steps.deployment, rank=steps.rank, **columns)  # type: ignore[arg-type]


def concat(parts: Sequence[RankSteps]) -> RankSteps:
    """Batches of one rank, in order, as one. ValueError if they are of several ranks, or none."""
    if not parts:
        raise ValueError("no batches to join")
    names = {(p.instance, p.deployment, p.rank) for p in parts}
    if len(names) > 1:
        raise ValueError(f"batches of different ranks cannot be joined: {sorted(names)}")
    return _like(parts[0], {name: np.concatenate([getattr(p, name) for p in parts]) for name in COLUMNS})


class StepLog:
    """Collects one rank's steps row by row; `take` hands over what came since the last call."""

    def __init__(self, *, instance: str, deployment: str, rank: int, num_moe_layers: int) -> None:
        self._who = {"instance": instance, "deployment": deployment, "rank": rank}
        self._layers = num_moe_layers
        self._rows: list[dict[str, object]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(
        self,
        *,
        step: int,
        start: float,
        wall: float,
        phases: Sequence[float],
        decode_tokens: int,
        prefill_tokens: int,
        cached_tokens: int,
        recomputed_tokens: int,
        received_rows: Sequence[int] | NDArray[np.integer],
        kv_used_blocks: int,
        preemptions: int,
        micro_batches: int = 1,
        overlap_reason: int = 0,
        placement_epoch: int = 0,
        dispatch_mode: int = 0,
        rows_dispatched: int = NOT_MEASURED,
        bytes_dispatched: int = NOT_MEASURED,
        bytes_combined: int = NOT_MEASURED,
        transport_busy: float = float("nan"),
        transport_waited: float = float("nan"),
    ) -> None:
        """One step; `phases` seconds in the order of PHASES, `received_rows` one number per MoE layer."""
        row = locals()
        self._rows.append({name: row[name] for name in COLUMNS})

    def take(self) -> RankSteps:
        """Everything appended since the last `take`, possibly no steps."""
        rows, self._rows = self._rows, []
        columns = {name: np.array([row[name] for row in rows], dtype=_DTYPES[name]) for name in COLUMNS}
        columns["phases"] = columns["phases"].reshape(len(rows), len(PHASES))
        columns["received_rows"] = columns["received_rows"].reshape(len(rows), self._layers)
        return RankSteps(**self._who, **columns)  # type: ignore[arg-type]


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Steps of one rank on the wire: each column as little-endian bytes, C order.

    Types and shapes are those of RankSteps: int64 or float64; [S], `phases` [S, P] with
    P = len(PHASES), `received_rows` [S, M]; S is `num_steps`, M is `num_moe_layers`.
    """

    instance: str
    deployment: str
    rank: int
    num_steps: int
    num_moe_layers: int
    step: bytes
    start: bytes
    wall: bytes
    phases: bytes
    decode_tokens: bytes
    prefill_tokens: bytes
    cached_tokens: bytes
    recomputed_tokens: bytes
    received_rows: bytes
    kv_used_blocks: bytes
    dispatch_mode: bytes
    rows_dispatched: bytes
    bytes_dispatched: bytes
    bytes_combined: bytes
    transport_busy: bytes
    transport_waited: bytes
    preemptions: bytes
    micro_batches: bytes
    overlap_reason: bytes
    placement_epoch: bytes


def pack(steps: RankSteps) -> StepBatch:
    """A rank's steps in wire form."""
    columns = {name: np.asarray(getattr(steps, name), dtype=_DTYPES[name]).tobytes() for name in COLUMNS}
    return StepBatch(
        instance=steps.instance,
        deployment=steps.deployment,
        rank=steps.rank,
        num_steps=len(steps),
        num_moe_layers=steps.num_moe_layers,
        **columns,
    )


def unpack(batch: StepBatch) -> RankSteps:
    """Inverse of `pack`; ValueError if a column has not the bytes that the sizes ask for."""
    width = {"phases": len(PHASES), "received_rows": batch.num_moe_layers}
    columns: dict[str, NDArray[np.generic]] = {}
    for name, dtype in _DTYPES.items():
        raw: bytes = getattr(batch, name)
        expected = batch.num_steps * width.get(name, 1) * 8
        if len(raw) != expected:
            raise ValueError(
                f"column {name} of {batch.num_steps} steps has {len(raw)} bytes, expected {expected}"
            )
        column = np.frombuffer(raw, dtype=dtype)
        columns[name] = column.reshape(batch.num_steps, width[name]) if name in width else column
    return RankSteps(instance=batch.instance, deployment=batch.deployment, rank=batch.rank, **columns)  # type: ignore[arg-type]


assert {f.name for f in fields(RankSteps)} - {"instance", "deployment", "rank"} == set(COLUMNS)
