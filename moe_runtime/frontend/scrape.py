"""Scrape: the ranks' numbers out of a server's /metrics, as records for a report.

A server keeps no log of steps, so a record is the mean step of the time between two looks: sums and
means are exact, what happened within an interval is not known.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from moe_runtime.errors import InputError
from moe_runtime.frontend.http_client import HttpFailure, Server, request
from moe_runtime.frontend.metrics import PREFIX
from moe_runtime.report.records import OVERLAP_REASONS, PHASES, RankSteps, StepLog
from moe_runtime.spec.limits import DISPATCH_MODES

EVERY_SECONDS = 1.0
ANSWER_SECONDS = 10.0
NOTE = "A step is a mean over a second or more: the server's /metrics was read, not a log of its steps."

_Rank = tuple[str, str, int]
_TWO_MICRO_BATCHES = ("asked", "gain")


@dataclass(slots=True)
class Look:
    """One reading of /metrics: for each rank, sample name (with the value of its own label) -> value."""

    time: float
    ranks: dict[_Rank, dict[str, float]]


@dataclass(slots=True)
class Scraper:
    """Reads the metrics of a server now and then."""

    server: Server
    looks: list[Look] = field(default_factory=list)

    async def look(self) -> None:
        """One reading; a server that does not answer is not counted."""
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                request(self.server, "GET", "/metrics") as answer,
            ):
                text = (await answer.body()).decode()
                if answer.status == 200:
                    self.looks.append(Look(time.monotonic(), read_ranks(text)))
        except (HttpFailure, TimeoutError, ValueError):  # no answer, or none of Prometheus' form
            return

    async def require_ranks(self, expected: Collection[_Rank], *, seconds: float = 5.0) -> None:
        """InputError if the server has other ranks than the plan, or still lacks some after `seconds`.

        A server that tells nothing of ranks may be any other.
        """
        deadline = time.monotonic() + seconds
        while True:
            await self.look()
            there = set(self.looks[-1].ranks) if self.looks else set()
            if not there or there == set(expected):
                return
            if not there < set(expected) or time.monotonic() > deadline:
                raise InputError(
                    f"--http: the server does not run this plan: its ranks are {_named(there)};"
                    f" the plan's are {_named(expected)}"
                )
            await asyncio.sleep(EVERY_SECONDS)

    async def follow(self) -> None:
        """Look every so often, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_SECONDS)

    def steps(self, num_moe_layers: int) -> list[RankSteps]:
        """Records of all ranks between the first and the last look."""
        if len(self.looks) < 2:
            return []
        return [
            _steps(rank, [(n.time, n.ranks[rank]) for n in self.looks if rank in n.ranks], num_moe_layers)
            for rank in sorted(self.looks[-1].ranks)
        ]


def _named(ranks: Collection[_Rank]) -> str:
    """`decode-0 rank 0 to 3, 5; prefill-0 rank 0`, instances in order."""
    runs: dict[str, list[list[int]]] = {}
    for _, instance, number in sorted(ranks):
        found = runs.setdefault(instance, [])
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    shown = {
        name: ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else f"{r[0]}" for r in found)
        for name, found in runs.items()
    }
    return "; ".join(f"{name} rank {numbers}" for name, numbers in shown.items())


def read_ranks(text: str) -> dict[_Rank, dict[str, float]]:
    """The samples of every rank, names without the prefix: `steps_total`, `tokens_total:output`."""
    found: dict[_Rank, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not (
                sample.name.startswith(f"{PREFIX}_") and labels.keys() >= {"deployment", "instance", "rank"}
            ):
                continue
            rank = (labels.pop("deployment"), labels.pop("instance"), int(labels.pop("rank")))
            name = ":".join([sample.name.removeprefix(f"{PREFIX}_"), *labels.values()])
            found.setdefault(rank, {})[name] = sample.value
    return found


def _steps(rank: _Rank, looks: Sequence[tuple[float, dict[str, float]]], num_moe_layers: int) -> RankSteps:
    deployment, instance, number = rank
    log = StepLog(instance=instance, deployment=deployment, rank=number, num_moe_layers=num_moe_layers)
    for (begin, old), (end, new) in zip(looks, looks[1:], strict=False):
        _interval(log, begin, end, old, new, num_moe_layers)
    return log.take()


def _interval(
    log: StepLog, begin: float, end: float, old: dict[str, float], new: dict[str, float], layers: int
) -> None:
    """Append the steps taken between two looks, all alike but for what does not divide."""

    def did(name: str) -> float:
        return new.get(name, 0.0) - old.get(name, 0.0)

    steps = round(did("steps_total"))
    counts = {
        "prefill_tokens": round(did("tokens_total:new_prefill")),
        "cached_tokens": round(did("tokens_total:cached_prefill")),
        "recomputed_tokens": round(did("tokens_total:recomputed")),
        "preemptions": round(did("preemptions_total")),
    }
    rows = round(did("step_rows_sum"))
    counts["decode_tokens"] = rows - counts["prefill_tokens"] - counts["recomputed_tokens"]
    reasons = [
        i
        for i, r in enumerate(OVERLAP_REASONS)
        for _ in range(round(did(f"steps_by_overlap_reason_total:{r}")))
    ]
    modes = [
        i
        for i, m in enumerate(DISPATCH_MODES)
        for _ in range(round(did(f"steps_by_dispatch_mode_total:{m}")))
    ]
    first = round(old.get("steps_total", 0.0))
    for i in range(steps):
        reason = reasons[i] if i < len(reasons) else 0
        log.append(
            step=first + i,
            start=begin + (end - begin) * i / steps,
            wall=did("step_seconds_total") / steps,
            phases=[did(f"step_phase_seconds_total:{phase}") / steps for phase in PHASES],
            received_rows=[0] * layers,
            kv_used_blocks=round(new["kv_blocks_used"]),
            micro_batches=2 if OVERLAP_REASONS[reason] in _TWO_MICRO_BATCHES else 1,
            overlap_reason=reason,
            dispatch_mode=modes[i] if i < len(modes) else 0,
            **{name: _share(total, i, steps) for name, total in counts.items()},
        )


def _share(total: int, i: int, parts: int) -> int:
    """Part i of a total cut into integer parts that differ by at most one."""
    return total * (i + 1) // parts - total * i // parts
