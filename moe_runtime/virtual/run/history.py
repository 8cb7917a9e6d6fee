"""LoadHistory: expert loads and placements of a deployment's instances over a simulation, for its report.

Owns how figures of balance are drawn where loads or placements changed on the way: each step with those it
ran with. L MoE layers, R ranks, N runs of steps of an instance.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moe_runtime.report.records import F64
from moe_runtime.report.schema import LayerBalance
from moe_runtime.report.schema_time import RankLoads
from moe_runtime.virtual.run.loads import DeploymentLoads

STEPS = 64  # drawn for the balancedness of a layer


@dataclass(frozen=True, slots=True)
class _Part:
    """Steps that ran with the same loads and the same placement."""

    loads: DeploymentLoads
    steps: float


class LoadHistory:
    """By instance, from the start on."""

    def __init__(self, start: Mapping[str, DeploymentLoads]) -> None:
        self._since = {name: [0.0] for name in start}
        self._loads = {name: [loads] for name, loads in start.items()}

    def change(self, instance: str, now: float, loads: DeploymentLoads) -> None:
        """Steps that begin from now on run with these."""
        self._since[instance].append(now)
        self._loads[instance].append(loads)

    def of(self, instance: str) -> DeploymentLoads:
        """The newest."""
        return self._loads[instance][-1]

    def step_balancedness(self, instance: str, start_N: F64, tokens_N: F64) -> F64:
        """float64 [N]: of micro-batches of so many tokens of all ranks, in steps that began then; mean over
        layers, NaN without tokens.
        """
        found, at_N = np.full(len(tokens_N), np.nan), self._index(instance, start_N)
        for index in np.unique(at_N).tolist():
            mine = at_N == index
            found[mine] = self._loads[instance][index].step_balancedness(tokens_N[mine])
        return found

    def layers(self, ran: Mapping[str, tuple[F64, F64]], tokens: float) -> tuple[LayerBalance, ...]:
        """Each MoE layer in micro-batches of `tokens`.

        ran  instance -> float64 [N] each: when runs of steps began, and their steps
        """
        parts = [part for name, runs in ran.items() for part in self._parts(name, *runs)]
        total = sum(p.steps for p in parts)
        draws = _shared_out(STEPS, [p.steps / total for p in parts])
        drawn_DL = np.concatenate(
            [p.loads.layers(tokens, n) for p, n in zip(parts, draws, strict=True) if n], axis=0
        )
        load_LR = _summed(parts, total)
        of_sum_L = load_LR.mean(axis=1) / load_LR.max(axis=1)
        mean_L, p5_L = drawn_DL.mean(axis=0), np.percentile(drawn_DL, 5, axis=0)
        return tuple(
            LayerBalance(layer=layer, steps=int(total), mean=float(mean), p5=float(p5), of_sum=float(of_sum))
            for layer, mean, p5, of_sum in zip(
                parts[0].loads.assumed.moe_layers, mean_L, p5_L, of_sum_L, strict=True
            )
        )

    def rank_loads(self, instance: str) -> RankLoads:
        """At the end."""
        return self.of(instance).rank_loads(instance)

    def _index(self, instance: str, start_N: F64) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        return np.searchsorted(self._since[instance], start_N, side="right") - 1

    def _parts(self, instance: str, start_N: F64, steps_N: F64) -> list[_Part]:
        steps = np.bincount(self._index(instance, start_N), weights=steps_N)
        return [_Part(self._loads[instance][i], float(steps[i])) for i in np.flatnonzero(steps).tolist()]


def _summed(parts: list[_Part], total: float) -> F64:
    """float64 [L, R]: loads of the ranks of all steps together; every step has the same rows."""
    first = parts[0].loads
    if all(p.loads is first for p in parts):
        return first.load_LR
    shares = [p.steps / total / p.loads.assumed.load_LE.sum(axis=1, keepdims=True) for p in parts]
    return np.asarray(sum(share * p.loads.load_LR for share, p in zip(shares, parts, strict=True)))


def _shared_out(count: int, shares: list[float]) -> list[int]:
    """`count` in whole numbers by shares that sum to 1; what is left goes to the largest remainders."""
    exact = np.array(shares) * count
    whole = np.floor(exact + 1e-9).astype(int)
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: count - whole.sum()]] += 1
    return [int(n) for n in whole]
