"""Experts: what a frontend asks of the ranks about expert loads, placements and new weights.

Loads are the sum over all ranks of a deployment, keyed by the model's layer numbers. Knows no HTTP.
"""

import asyncio
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.balancing.wire import (
    AskPlacement,
    FinishReload,
    PlacementNow,
    Rebalance,
    RecordedLoads,
    RecordLoads,
    Reload,
    ReloadAnswer,
    ReloadState,
    ToFrontendBalancing,
)
from moe_runtime.errors import RequestRefused
from moe_runtime.files import write_atomically
from moe_runtime.frontend.fleet import Fleet

ANSWER_SECONDS = 30.0
READ_SECONDS = 1800.0  # for all ranks to read a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """pairs_LE int64: (token, expert) pairs that were routed, of the layers with these numbers."""

    layers: tuple[int, ...]
    pairs_LE: NDArray[np.int64]


class Experts:
    """One question of a kind at a time; TimeoutError where a rank does not answer."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._placements: dict[str, PlacementNow] = {}
        self._loads: dict[tuple[str, int], RecordedLoads] = {}
        self._reloads: dict[tuple[str, int], ReloadAnswer] = {}
        self._version = 0
        self._news = asyncio.Condition()
        self._asking, self._reloading = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        fleet.on_experts = self._take

    async def placements(self) -> Mapping[str, PlacementNow]:
        """What every instance has now, by its name."""
        first = [key for key in self._fleet.ranks if key[1] == 0]
        async with self._asking:
            self._placements.clear()
            for key in first:
                self._fleet.tell(key, AskPlacement(frontend=self._fleet.number))
            await self._until(lambda: len(self._placements) == len(first))
            return dict(self._placements)

    def rebalance(self, instances: Sequence[str]) -> None:
        """Have these instances solve and move now."""
        for instance in instances:
            self._fleet.tell((instance, 0), Rebalance())

    def record(self, action: Literal["start", "stop"]) -> None:
        """Have all ranks count from zero, or count no more."""
        for key in self._fleet.ranks:
            self._fleet.tell(key, RecordLoads(frontend=self._fleet.number, action=action))

    async def dump(self) -> Mapping[str, ExpertLoads]:
        """What was recorded, by deployment: since the ranks were ready, or since recording was started."""
        async with self._asking:
            self._loads.clear()
            for key in self._fleet.ranks:
                self._fleet.tell(key, RecordLoads(frontend=self._fleet.number, action="dump"))
            await self._until(lambda: len(self._loads) == len(self._fleet.ranks))
            return summed(list(self._loads.values()))

    async def reload(self, path: Path) -> None:
        """Have all ranks go over to the weights of a checkpoint that suits the plan; returns when they have.

        Raises RequestRefused, and the old weights stay in use, if a rank is not ready, cannot read them,
        takes too long, or has been asked by another frontend before; TimeoutError if a rank never says that
        it goes along.
        """
        if self._reloading.locked():
            raise RequestRefused("another reload is on its way")
        if missing := self._fleet.missing:  # they are yet to take memory for the old weights
            raise RequestRefused(f"not ready: {', '.join(missing)}")
        async with self._reloading:
            self._version, answers = time.time_ns(), self._reloads
            answers.clear()
            self._tell_all(Reload(frontend=self._fleet.number, version=self._version, path=str(path)))
            why = ""
            try:
                await self._until(lambda: self._all("staged") or self._failed(), READ_SECONDS)
            except TimeoutError:
                why = f"not all ranks have read it within {READ_SECONDS:g} s"
            finally:  # also where nobody waits for the answer any more
                commit = self._all("staged")
                self._tell_all(FinishReload(version=self._version, commit=commit, why=why))
            await self._until(lambda: self._all("in use", "failed"), READ_SECONDS)
            if not self._all("in use"):
                causes = [f"{i} rank {r}: {a.why}" for (i, r), a in answers.items() if a.why]
                raise RequestRefused(f"{path}: not loaded; {'; '.join(causes) or 'dropped, ask again'}")

    def _all(self, *states: ReloadState) -> bool:
        """Every rank's newest answer is one of these."""
        answers = self._reloads.values()
        return len(answers) == len(self._fleet.ranks) and all(a.state in states for a in answers)

    def _failed(self) -> bool:
        return any(a.state == "failed" for a in self._reloads.values())

    def _tell_all(self, message: msgspec.Struct) -> None:
        for key in self._fleet.ranks:
            self._fleet.tell(key, message)

    async def _until(self, condition: Callable[[], bool], seconds: float = ANSWER_SECONDS) -> None:
        async with asyncio.timeout(seconds), self._news:
            await self._news.wait_for(condition)

    def _take(self, message: ToFrontendBalancing) -> None:
        match message:
            case PlacementNow():
                self._placements[message.instance] = message
            case RecordedLoads():
                self._loads[message.instance, message.rank] = message
            case ReloadAnswer(version=version) if version == self._version:
                self._reloads[message.instance, message.rank] = message
        task = asyncio.create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


def summed(parts: list[RecordedLoads]) -> dict[str, ExpertLoads]:
    """All ranks' counts of each deployment, added up."""
    out: dict[str, ExpertLoads] = {}
    for part in parts:
        pairs_LE = np.frombuffer(part.pairs, np.int64).reshape(len(part.layers), -1)
        before = out.get(part.deployment)
        total = pairs_LE if before is None else before.pairs_LE + pairs_LE
        out[part.deployment] = ExpertLoads(layers=tuple(part.layers), pairs_LE=total)
    return out


def write_loads(path: Path, loads: Mapping[str, ExpertLoads]) -> list[Path]:
    """Write .npz files with `load` int64 [L, E] and `layers` int64 [L]; returns their paths.

    One deployment's is `path`; of several, the name of each stands before the ending: F.decode.npz.
    """
    written = []
    for name, one in loads.items():
        target = path if len(loads) == 1 else path.with_suffix(f".{name}{path.suffix}")
        data = io.BytesIO()
        np.savez(data, load=one.pairs_LE, layers=np.array(one.layers, np.int64))
        write_atomically(target, data.getvalue())
        written.append(target)
    return written
