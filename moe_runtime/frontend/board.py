"""Board: what the ranks last said of themselves, and rates over the last seconds.

Pure: no sockets, no clock (`now` is an argument), nothing of HTTP or Prometheus. Every number of a
rank is counted by that rank alone, so a sum over ranks counts everything once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_runtime.engine.messages import RankTotals, Status

WINDOW_SECONDS = 10.0
STALE_SECONDS = 5.0
KINDS = ("new_prefill", "cached_prefill", "recomputed", "output")

RankKey = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank: its newest status, when it came, and what it did in the window.

    seconds      of the rank's clock that `did` covers; 0 before a second status came
    did          the totals of the window
    """

    status: Status
    heard: float
    seconds: float
    did: RankTotals

    def rate(self, kind: str) -> float:
        """Tokens per second of one of KINDS."""
        return tokens_of(self.did, kind) / self.seconds if self.seconds > 0 else 0.0


class Board:
    """The newest `WINDOW_SECONDS` of statuses of every rank; `expected` ranks are stale until heard."""

    def __init__(self, expected: Sequence[RankKey] = ()) -> None:
        self._history: dict[RankKey, deque[tuple[float, Status]]] = {key: deque() for key in expected}

    def observe(self, status: Status, now: float) -> None:
        """A rank's status came."""
        history = self._history.setdefault((status.instance, status.rank), deque())
        history.append((now, status))
        while len(history) > 2 and history[1][1].time <= status.time - WINDOW_SECONDS:
            history.popleft()

    def ranks(self) -> list[RankView]:
        """Every rank heard of, in order of instance and rank."""
        views = []
        for key in sorted(self._history):
            history = self._history[key]
            if history:
                heard, newest = history[-1]
                oldest = history[0][1]
                views.append(
                    RankView(
                        status=newest,
                        heard=heard,
                        seconds=newest.time - oldest.time,
                        did=difference(newest.totals, oldest.totals),
                    )
                )
        return views

    def stale(self, now: float) -> list[str]:
        """Names of the ranks that were never heard of, or not for `STALE_SECONDS`."""
        return [
            f"{instance} rank {rank}"
            for (instance, rank), history in sorted(self._history.items())
            if not history or now - history[-1][0] > STALE_SECONDS
        ]

    def role_rates(self, ranks_per_node: int) -> dict[str, dict[str, float]]:
        """Tokens per second and node of each deployment, by kind; its nodes: ranks / ranks_per_node."""
        by_role: dict[str, list[RankView]] = {}
        for view in self.ranks():
            by_role.setdefault(view.status.deployment, []).append(view)
        return {
            role: {kind: sum(v.rate(kind) for v in views) * ranks_per_node / len(views) for kind in KINDS}
            for role, views in by_role.items()
        }

    def balancedness(self) -> dict[str, float]:
        """Per instance, mean rank load / max rank load of the window's rows, averaged over the MoE layers.

        Instances without rows in the window are left out.
        """
        by_instance: dict[str, list[Sequence[int]]] = {}
        for view in self.ranks():
            by_instance.setdefault(view.status.instance, []).append(view.did.received_rows)
        out = {}
        for instance, loads in by_instance.items():
            layers = [rows for rows in zip(*loads, strict=False) if max(rows) > 0]
            if layers:
                out[instance] = sum(sum(r) / len(r) / max(r) for r in layers) / len(layers)
        return out


def tokens_of(totals: RankTotals, kind: str) -> int:
    """One of KINDS out of a rank's totals."""
    value: int = getattr(totals, f"{kind}_tokens")
    return value


def difference(newer: RankTotals, older: RankTotals) -> RankTotals:
    """What was done between two statuses of a rank."""
    fields: dict[str, Any] = {}
    for name in RankTotals.__struct_fields__:
        new, old = getattr(newer, name), getattr(older, name)
        if isinstance(new, list):
            old = old or [0] * len(new)
            fields[name] = [n - o for n, o in zip(new, old, strict=True)]
        else:
            fields[name] = new - old
    return RankTotals(**fields)
