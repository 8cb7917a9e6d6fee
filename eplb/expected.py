"""The peak to be expected of a plan whose loads are uncertain, and split weights made for it.

Let every expert's load have an independent relative standard error s. A rank's load X has then a variance
of s^2 times the sum of its squared shares, and for any p >= 1 (Jensen, twice)

    E max X <= (sum of E X^p)^(1/p),    E X^p about (load + p variance / 2 load)^p.

So a rank counts its load and an allowance, which is a sum over its slots, and the peak is the p-norm over
the ranks: nearly as heavy ranks count too, and relieving one of them is worth something. The bound is
tightest for p = sqrt(2 ln R) / (relative error of a rank). The allowance has that p; the norm has twice that,
which was found to choose plans a little better.

Both take the mean rank load for a rank's, which is right for plans that are nearly balanced.

Powers are squarings and roots square roots, which are exact to the last bit on any machine.
"""

import math

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.split import level_shares
from moe_runtime.eplb.state import State

ERROR_STEPS = 4096.0  # errors are rounded to this part of one: the last bits of a measured one do not matter
FINE = float(1 << 40)  # powers are counted in 2^-40, so that sums are exact
LARGEST_EXPONENT = 12  # of two: beyond, the norm is the maximum


def expected_peak(state: State, error: float) -> NDArray[np.float64]:
    """float64 [L]: the expected largest rank load; without error the largest.

    error  relative standard error of an expert's load
    """
    exponent = _exponent(state, error)
    if exponent is None:
        return state.peak_L
    load_LR = state.load_LR + _allowance(state, error, exponent)
    top_L = load_LR.max(axis=1)
    power_LR = load_LR / top_L[:, None]
    for _ in range(exponent + 1):
        power_LR *= power_LR
    norm_L = np.floor(power_LR * FINE).sum(axis=1) / FINE
    for _ in range(exponent + 1):
        norm_L = np.sqrt(norm_L)
    expected_L: NDArray[np.float64] = top_L * norm_L
    return expected_L


def level_for(state: State, goal_L: NDArray[np.float64], sweeps: int, error: float) -> None:
    """Level the shares of replicated experts, in place, so that ranks stand level with their allowances.

    goal_L  peak, without allowances, at which a layer is left alone; the mean allowance comes on top

    Allowances are those of the shares before; who levels again comes nearer.
    """
    exponent = _exponent(state, error)
    if exponent is None:
        level_shares(state, goal_L, sweeps)
        return
    allowance_LR = _allowance(state, error, exponent)
    state.load_LR += allowance_LR
    level_shares(state, goal_L + allowance_LR.mean(axis=1), sweeps)
    state.load_LR -= allowance_LR


def _exponent(state: State, error: float) -> int | None:
    """log2 of p, rounded; None where the error is too small to matter."""
    _, R, N = state.expert_LRN.shape
    rounded = round(error * ERROR_STEPS) / ERROR_STEPS
    if rounded == 0 or R == 1:
        return None
    p = math.sqrt(2 * math.log(R) * N) / rounded
    return max(1, min(round(math.log2(p)), LARGEST_EXPONENT))


def _allowance(state: State, error: float, exponent: int) -> NDArray[np.float64]:
    """[L, R], whole units: p variance / (2 mean load)."""
    rounded = round(error * ERROR_STEPS) / ERROR_STEPS
    mean_L = state.load_LR.sum(axis=1) / state.load_LR.shape[1]
    factor_L = 2.0**exponent * rounded**2 / 2 / mean_L
    allowance_LR: NDArray[np.float64] = np.floor(factor_L[:, None, None] * np.square(state.share_LRN)).sum(
        axis=2
    )
    return allowance_LR
