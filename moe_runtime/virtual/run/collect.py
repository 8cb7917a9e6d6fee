"""Collector: hears a virtual cluster and keeps what a report needs, a row per run of steps and none per rank.

Owns the columns. Sums per rank are kept for the steps that end by the last arrival and for those after it,
as that is where a report's window ends; a run of steps across that moment is cut in two. R ranks.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_runtime.report.outcomes import RequestOutcome
from moe_runtime.report.records import F64
from moe_runtime.spec.limits import DISPATCH_MODES
from moe_runtime.virtual.cluster.records import I64, RequestEnd, StepRun
from moe_runtime.virtual.cost.shapes import BOUNDS, PARTS

COLUMNS = (
    "start",
    "seconds",
    "steps",
    "decode",  # rows of all ranks and steps; likewise the next four
    "prefill",
    "cached",
    "recomputed",
    "preemptions",
    "kv",  # blocks in use, all ranks, mean over the steps
    "fill",  # step fill; NaN without rows
    "mode",
    "micro_batches",
    "reason",
    "communication",
    "exposed",
    "ideal",
    *(f"part {p}" for p in PARTS),
    *(f"bound {b}" for b in BOUNDS),
)
_AT = {name: i for i, name in enumerate(COLUMNS)}
_MODE = {mode: i for i, mode in enumerate(DISPATCH_MODES)}


@dataclass(slots=True)
class RankSums:
    """Int64 [R] each: rows and tokens of the steps so far; `kv_peak` blocks."""

    decode: I64
    prefill: I64
    cached: I64
    recomputed: I64
    preemptions: I64
    kv_peak: I64

    @classmethod
    def zeros(cls, ranks: int) -> "RankSums":
        return cls(*(np.zeros(ranks, np.int64) for _ in range(6)))

    def add(self, run: StepRun) -> None:
        self.decode += run.decode_R * run.steps
        self.prefill += run.prefill_R
        self.cached += run.cached_R
        self.recomputed += run.recomputed_R
        self.preemptions += run.preemptions_R
        np.maximum(self.kv_peak, run.kv_used_R, out=self.kv_peak)

    def plus(self, other: "RankSums") -> "RankSums":
        return RankSums(
            decode=self.decode + other.decode,
            prefill=self.prefill + other.prefill,
            cached=self.cached + other.cached,
            recomputed=self.recomputed + other.recomputed,
            preemptions=self.preemptions + other.preemptions,
            kv_peak=np.maximum(self.kv_peak, other.kv_peak),
        )


class InstanceRuns:
    """The runs of steps of one instance, in order: `column(name)` float64 [N]."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.inside, self.after = RankSums.zeros(ranks), RankSums.zeros(ranks)
        self._rows = array("d")

    def __len__(self) -> int:
        return len(self._rows) // len(COLUMNS)

    def append(self, row: tuple[float, ...]) -> None:
        self._rows.extend(row)

    def column(self, name: str) -> F64:
        table: NDArray[np.float64] = np.frombuffer(self._rows, np.float64).reshape(-1, len(COLUMNS))
        return table[:, _AT[name]]

    @property
    def end(self) -> F64:
        """When each run ended."""
        return self.column("start") + self.column("seconds")


class Collector:
    """A Listener (see `cluster.records`).

    ranks        instance -> its ranks
    last_arrival virtual seconds
    block_tokens deployment's tokens of a KV block, by instance
    """

    def __init__(
        self, ranks: Mapping[str, int], *, last_arrival: float, block_tokens: Mapping[str, int]
    ) -> None:
        self.runs = {name: InstanceRuns(count) for name, count in ranks.items()}
        self.outcomes: list[RequestOutcome] = []
        self._edge = last_arrival
        self._block_tokens = block_tokens

    def steps(self, run: StepRun) -> None:
        if run.steps > 1 and run.start < self._edge < run.start + run.seconds:
            before = min(run.steps - 1, int((self._edge - run.start) * run.steps / run.seconds))
            parts = _cut(run, before, self._block_tokens[run.instance]) if before else (run,)
        else:
            parts = (run,)
        for part in parts:
            self._add(part)

    def request(self, end: RequestEnd) -> None:
        # A virtual client sends on time.
        self.outcomes.append(
            RequestOutcome(
                index=end.index,
                scheduled_arrival=float(end.arrival),
                sent=float(end.arrival),
                first_token=_float(end.first_token),
                second_token=_float(end.second_token),
                last_token=_float(end.last_token),
                num_tokens=end.output_tokens,
                prompt_tokens=end.prompt_tokens,
                cached_tokens=end.cached_tokens,
                output_tokens=end.output_tokens,
                finish_reason=end.finish_reason,
                error=end.error,
                prefill_instance=end.prefill_instance,
                decode_instance=end.decode_instance,
            )
        )

    def _add(self, run: StepRun) -> None:
        runs = self.runs[run.instance]
        (runs.inside if run.start + run.seconds <= self._edge else runs.after).add(run)
        rows_R = run.decode_R + (run.prefill_R + run.recomputed_R)
        rows, most = int(np.add.reduce(rows_R)), int(np.maximum.reduce(rows_R))
        decode = int(np.add.reduce(run.decode_R))
        grown = decode * (run.steps - 1) / 2 / self._block_tokens[run.instance]
        cost, decision = run.cost, run.decision
        runs.append(
            (
                run.start,
                run.seconds,
                run.steps,
                decode * run.steps,
                int(np.add.reduce(run.prefill_R)),
                int(np.add.reduce(run.cached_R)),
                int(np.add.reduce(run.recomputed_R)),
                int(np.add.reduce(run.preemptions_R)),
                int(np.add.reduce(run.kv_used_R)) - grown,
                rows / (runs.ranks * most) if most else float("nan"),
                _MODE[decision.dispatch_mode],
                decision.micro_batches,
                int(decision.overlap_reason),
                cost.communication,
                cost.exposed,
                cost.ideal,
                *map(cost.parts.__getitem__, PARTS),
                *map(cost.bounds.__getitem__, BOUNDS),
            )
        )


def _float(time: float | None) -> float | None:
    """Not a number of numpy, which JSON does not know."""
    return None if time is None else float(time)


def _cut(run: StepRun, before: int, block_tokens: int) -> tuple[StepRun, StepRun]:
    """The run as two, `before` steps in the first one, all steps taken as equal; blocks grow evenly."""
    share, none = before / run.steps, np.zeros_like(run.decode_R)
    grown_R = run.decode_R * (run.steps - before) // block_tokens
    seconds = run.seconds * share
    first = replace(
        run,
        steps=before,
        seconds=seconds,
        cost=run.cost.times(share),
        kv_used_R=np.maximum(run.kv_used_R - grown_R, 0),
    )
    rest = replace(
        run,
        first_step=run.first_step + before,
        steps=run.steps - before,
        start=run.start + seconds,
        seconds=run.seconds - seconds,
        cost=run.cost.times(1 - share),
        prefill_R=none,
        cached_R=none,
        recomputed_R=none,
        preemptions_R=none,
    )
    return first, rest
