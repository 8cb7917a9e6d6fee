"""Expert loads as exact numbers: validation, and integer units in which every sum is exact.

The balancer computes in float64 arrays that hold integers below 2^53, so additions give the same
bits in any order, on any machine and numpy; that is what makes plans reproducible to the byte.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_runtime.eplb.errors import BalanceError

LAYER_BITS = 50  # the units of a layer sum to less than 2^51
LARGEST_LOAD = 1e300  # so that sums of loads are finite


def check_load(load_LE: ArrayLike) -> NDArray[np.float64]:
    """Loads as float64 [L, E]; BalanceError names the first layer and expert that is not a load."""
    try:
        out = np.asarray(load_LE, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BalanceError(f"loads are not numbers: {error}") from error
    if out.ndim != 2 or not out.size:
        raise BalanceError(
            f"loads must be [layers, experts] with at least one of each, got shape {out.shape}"
        )
    for bad, what in ((np.isnan(out), "NaN"), (out < 0, "negative"), (np.isinf(out), "infinite")):
        if bad.any():
            layer, expert = (int(i) for i in np.argwhere(bad)[0])
            raise BalanceError(
                f"layer {layer}: the load of expert {expert} is {what} ({out[layer, expert]});"
                " loads are finite numbers >= 0"
            )
    if (large := out.max()) > LARGEST_LOAD:
        raise BalanceError(f"a load is {large:g}; {LARGEST_LOAD:g} is the largest")
    return out


def to_units(load_LE: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Loads in whole units, float64 [L, E] with integer values >= 1, and the scale of each layer.

    load = units * 2^-scale, to the nearest unit. The scale is a power of two chosen by the largest
    load, so that integer loads stay exactly in proportion and no summation order matters. An expert
    without load counts as one unit: spare replicas then spread evenly over idle experts.
    """
    E = load_LE.shape[1]
    _, exponent_L = np.frexp(load_LE.max(axis=1, initial=0.0))
    scale_L = LAYER_BITS - int(E).bit_length() - exponent_L.astype(np.int64)
    # In two steps: a layer of denormal loads has a scale beyond what a float can hold.
    half_L = scale_L // 2
    units_LE = np.ldexp(np.ldexp(load_LE, half_L[:, None]), (scale_L - half_L)[:, None])
    return np.maximum(np.rint(units_LE), 1.0), scale_L


def from_units(units: NDArray[np.float64], scale_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """The inverse of `to_units` for an array whose first axis is the layers."""
    shape = (-1,) + (1,) * (units.ndim - 1)
    half_L = scale_L // 2
    out: NDArray[np.float64] = np.ldexp(
        np.ldexp(units, -half_L.reshape(shape)), -(scale_L - half_L).reshape(shape)
    )
    return out
