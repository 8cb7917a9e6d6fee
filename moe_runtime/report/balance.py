"""Lock-step arithmetic over the ranks of one instance: joined steps, balancedness, step fill.

R ranks, S steps that every rank logged, M MoE layers.
"""

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from moe_runtime.report.records import NOT_MEASURED, RankSteps
from moe_runtime.report.schema import LayerBalance


def join(ranks: Sequence[RankSteps]) -> list[RankSteps]:
    """The same ranks with only the steps that all of them have, in step order.

    A step that ended inside the window on one rank and outside on another is left out.
    """
    common: NDArray[np.int64] = reduce(np.intersect1d, [r.step for r in ranks])
    joined = []
    for rank in ranks:
        order = np.argsort(rank.step, kind="stable")
        joined.append(rank.select(order[np.searchsorted(rank.step[order], common)]))
    return joined


def loads(ranks: Sequence[RankSteps]) -> NDArray[np.int64]:
    """int64 [R, S, M]: rows each rank received, of joined ranks; all zero where a rank did not measure."""
    loads_RSM = np.stack([r.received_rows for r in ranks])
    loads_RSM[:, (loads_RSM == NOT_MEASURED).any(axis=0)] = 0
    return loads_RSM


def per_step_balancedness(loads_RSM: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [S, M]: mean rank load / max rank load; NaN where the layer received no rows."""
    most_SM = loads_RSM.max(axis=0)
    out = np.full(most_SM.shape, np.nan)
    np.divide(loads_RSM.mean(axis=0), most_SM, out=out, where=most_SM > 0)
    return out


def layer_balance(
    layer: int, per_step_S: NDArray[np.float64], summed: Sequence[NDArray[np.int64]]
) -> LayerBalance:
    """One layer: mean and 5th percentile of the steps with load, and balancedness of the summed loads.

    `summed` has one array [R] per instance: rows of the whole window by rank.
    """
    used = per_step_S[~np.isnan(per_step_S)]
    if not len(used):
        return LayerBalance(layer=layer, steps=0, mean=None, p5=None, of_sum=None)
    most = sum(int(s.max()) for s in summed)
    return LayerBalance(
        layer=layer,
        steps=len(used),
        mean=float(used.mean()),
        p5=float(np.percentile(used, 5)),
        of_sum=sum(float(s.mean()) for s in summed) / most,
    )


def over_mean(load_MR: NDArray[np.int64] | NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    """[layers][ranks]: load of each rank over its layer's mean; 1 in layers without any. Four digits."""
    mean_M1 = load_MR.mean(axis=1, keepdims=True)
    ratio_MR = np.ones(load_MR.shape)
    np.divide(load_MR, mean_M1, out=ratio_MR, where=mean_M1 > 0)
    return tuple(tuple(row) for row in np.round(ratio_MR, 4).tolist())


def step_fills(ranks: Sequence[RankSteps]) -> NDArray[np.float64]:
    """float64 [S]: sum of the ranks' tokens / (R x max), of joined ranks; NaN for steps without tokens."""
    tokens_RS = np.stack([r.tokens for r in ranks])
    most_S = tokens_RS.max(axis=0)
    out = np.full(len(most_S), np.nan)
    np.divide(tokens_RS.sum(axis=0), len(ranks) * most_S, out=out, where=most_S > 0)
    return out


def step_fill(ranks: Sequence[RankSteps]) -> NDArray[np.float64]:
    """float64 [steps with tokens]: step fills, of joined ranks."""
    fills_S = step_fills(ranks)
    return fills_S[~np.isnan(fills_S)]
