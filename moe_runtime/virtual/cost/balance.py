"""Balance: how unevenly a step's rows fall on the ranks, by the number of tokens in it.

Owns the table of spreads a cost model looks up, drawn from expert loads through a placement: an expert's
load drifts from step to step (log-normal, one drift for all tokens of a step), tokens choose at random.
Pure and seeded. L layers, E experts, R ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.placement import Placement
from moe_runtime.virtual.cost.links import Spread

BINS = 3  # equal parts of layers and steps, from even to uneven
DRAWS = 8
GRID = 4.0  # ratio of the token numbers of the table
LARGEST = 4.0**13
LARGEST_DRIFT = 1.5  # one sequence alone: beyond, a log-normal says more than is known


@dataclass(frozen=True, slots=True)
class Balance:
    """Spreads by tokens of a micro-batch, all ranks together.

    tokens_G    grid, ascending
    rows_GB, ranks_GB, nodes_GB  largest over mean, see `Spread`, by grid point and bin
    """

    tokens_G: NDArray[np.float64]
    rows_GB: NDArray[np.float64]
    ranks_GB: NDArray[np.float64]
    nodes_GB: NDArray[np.float64]

    def spreads(self, tokens: float) -> tuple[Spread, ...]:
        """Spread of each bin; between grid points the largest loads, not their ratios, are interpolated."""
        grid = self.tokens_G
        at = int(np.searchsorted(grid, tokens))
        if at == 0 or len(grid) == 1:
            low = high = 0
            weight = 0.0
        elif at == len(grid):
            low = high = at - 1
            weight = 0.0
        else:
            low, high = at - 1, at
            weight = float((tokens - grid[low]) / (grid[high] - grid[low]))
        scale = (1 - weight) * grid[low] / tokens if weight else 1.0
        other = weight * grid[high] / tokens if weight else 0.0
        tables = (self.rows_GB, self.ranks_GB, self.nodes_GB)
        columns = [(t[low] * scale + t[high] * other).tolist() for t in tables]
        return tuple(Spread(*values) for values in zip(*columns, strict=True))

    def balancedness(self, tokens: float) -> float:
        """Mean over layers and steps of mean load / largest load."""
        return float(np.mean([1 / s.rows for s in self.spreads(tokens)]))


_ONE = np.ones((1, 1))
EVEN_BALANCE = Balance(np.ones(1), _ONE, _ONE, _ONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Standard deviation of an expert's log load in a micro-batch: sqrt(common^2 + sequence^2 / sequences).

    common    what all sequences share: the topics of the hour
    sequence  of one sequence alone; many of them average out, a few long prompts do not
    """

    common: float
    sequence: float

    def of(self, sequences: float) -> float:
        variance = self.common**2 + self.sequence**2 / max(sequences, 1.0)
        return min(LARGEST_DRIFT, float(np.sqrt(variance)))


def draw_balance(
    load_LE: NDArray[np.float64],
    placement: Placement,
    *,
    top_k: int,
    drift: Drift,
    tokens_per_sequence: float = 1.0,
    ranks_per_node: int = 8,
    seed: int = 0,
    draws: int = DRAWS,
) -> Balance:
    """Spreads of `placement` under loads that are `load_LE` on average.

    load_LE  [L, E], any unit: the long-run load; one row per MoE layer of the placement
    tokens_per_sequence  of a micro-batch: 1 in decode, the prompts' length in prefill
    """
    rng = np.random.default_rng(seed)
    L, E = load_LE.shape
    probability_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
    normal_DLE = rng.standard_normal((draws, L, E))  # common to all grid points: more tokens, same topics
    grid = GRID ** np.arange(0, np.log(LARGEST) / np.log(GRID) + 0.5)
    nodes = -(-placement.num_ranks // ranks_per_node)
    out = np.zeros((3, len(grid), BINS))
    for g, tokens in enumerate(grid):
        strays = drift.of(tokens / tokens_per_sequence)
        rows_DLE = _draw_rows(rng, probability_LE, strays * normal_DLE, tokens * top_k)
        ratio = np.concatenate([_largest(r, placement, nodes, top_k) for r in rows_DLE], axis=1)
        order = np.sort(ratio, axis=1)
        out[:, g] = np.stack([part.mean(axis=1) for part in np.array_split(order, BINS, axis=1)], axis=1)
    # The largest load cannot fall as tokens are added; draws may say so by chance.
    largest = np.maximum.accumulate(out * grid[None, :, None], axis=1) / grid[None, :, None]
    return Balance(grid, largest[0], largest[1], largest[2])


def layer_balancedness(
    load_LE: NDArray[np.float64],
    placement: Placement,
    *,
    top_k: int,
    drift: Drift,
    tokens: float,
    tokens_per_sequence: float = 1.0,
    seed: int = 0,
    draws: int = DRAWS,
) -> NDArray[np.float64]:
    """float64 [draws, L]: balancedness of every layer in micro-batches of `tokens`; as in `draw_balance`."""
    rng = np.random.default_rng(seed)
    probability_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
    strays = drift.of(tokens / tokens_per_sequence)
    found = np.empty((draws, len(load_LE)))
    for draw in found:
        drift_LE = strays * rng.standard_normal(load_LE.shape)
        load_LR = placement.rank_load(_draw_rows(rng, probability_LE, drift_LE, tokens * top_k))
        draw[:] = 1 / _over_mean(load_LR)
    return found


def _draw_rows(
    rng: np.random.Generator,
    probability_LE: NDArray[np.float64],
    drift_XLE: NDArray[np.float64],
    rows: float,
) -> NDArray[np.float64]:
    """[..., L, E]: rows of every expert, about `rows` of a layer together."""
    noisy = probability_LE * np.exp(drift_XLE)
    noisy *= rows / noisy.sum(axis=-1, keepdims=True)
    return rng.poisson(noisy).astype(np.float64)


def _largest(
    rows_LE: NDArray[np.float64], placement: Placement, nodes: int, top_k: int
) -> NDArray[np.float64]:
    """[3, L]: largest over mean of rows per rank, tokens reaching a rank, tokens reaching a node."""
    load_LR = placement.rank_load(rows_LE)
    total_L = np.maximum(load_LR.sum(axis=1, keepdims=True), 1.0)
    share_LR = load_LR / total_L
    L, R = share_LR.shape
    per_node = -(-R // nodes)
    padded = np.zeros((L, nodes * per_node))
    padded[:, :R] = share_LR
    share_LN = padded.reshape(L, nodes, per_node).sum(axis=2)
    reach = [1 - (1 - np.minimum(s, 1.0)) ** top_k for s in (share_LR, share_LN)]
    return np.stack(
        [
            _over_mean(share_LR),
            _over_mean(reach[0]),
            _over_mean(reach[1]),
        ]
    )


def _over_mean(value: NDArray[np.float64]) -> NDArray[np.float64]:
    mean = value.mean(axis=1)
    return np.where(mean > 0, value.max(axis=1) / np.maximum(mean, 1e-300), 1.0)
