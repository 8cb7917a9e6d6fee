"""Fits the cost model's factors on the rows that configs/hardware/fitted.yaml names, and writes them there.

    python -m benchmarks.fit_cost_model [--write] [--table]

First the two drifts, by bisection on the balancedness that was measured per step; then the other three
together, by least squares of log errors. Looks at no row but the named ones.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from moe_runtime.virtual.cost.balance import Drift
from moe_runtime.virtual.cost.comparison import summary, table
from moe_runtime.virtual.cost.constants import FOLDER, Constants, constants
from moe_runtime.virtual.cost.published import Deployed, deployment_balance, error_of, published_rows

DOCS = Path(__file__).resolve().parent.parent / "docs" / "cost-model.md"
BEGIN, END = "<!-- rows -->", "<!-- end of rows -->"
BOUNDS = {"kernel_start": (1e-6, 1e-5), "normal_start": (0.0, 2e-3), "normal_transfers": (1.0, 2.0)}
SWEEPS, GOLDEN = 6, (5**0.5 - 1) / 2
UNITS = {
    "kernel_start": ("kernel_start_us", 1e6),
    "normal_start": ("normal_start_us", 1e6),
}
# role -> (ranks, tokens a rank and step, tokens a sequence, balancedness measured per step with balancing on)
MEASURED = {"prefill": (32, 16384, 4096, 0.80), "decode": (72, 256, 1, 0.81)}


def bisect(role: Literal["prefill", "decode"], drift: Callable[[float], Drift], high: float) -> float:
    """The value of a drift's parameter that gives the measured balancedness."""
    ranks, tokens, per_sequence, target = MEASURED[role]
    deployed, low = Deployed("deepseek-v3", role, ranks, 8, 32, True), 0.0
    for _ in range(12):
        middle = (low + high) / 2
        balance = deployment_balance(deployed, drift(middle), per_sequence)
        low, high = (middle, high) if balance.balancedness(ranks * tokens) > target else (low, middle)
    return round((low + high) / 2, 3)


def calibrate(known: Constants) -> Constants:
    """Decode has so many sequences that only what they share is left; prefill has what a prompt adds."""
    common = bisect("decode", lambda x: Drift(common=x, sequence=0.0), 1.0)
    sequence = bisect("prefill", lambda x: Drift(common=common, sequence=x), 8.0)
    return with_factors(known, drift_common=common, drift_sequence=sequence)


def with_factors(known: Constants, **values: float) -> Constants:
    return replace(known, fitted=known.fitted.changed(**values))


def errors(known: Constants) -> np.ndarray:
    rows = published_rows()
    return np.array([np.log1p(error_of(rows[name], known)) for name in known.fitted.rows])


def fit(known: Constants) -> Constants:
    """Least squares of log errors: each factor in turn, by golden section between its bounds."""
    values = {name: getattr(known.fitted, name) for name in BOUNDS}
    for _ in range(SWEEPS):
        for name, (low, high) in BOUNDS.items():

            def loss(x: float, name: str = name) -> float:
                return float(np.square(errors(with_factors(known, **{**values, name: x}))).sum())

            values[name] = golden(loss, low, high)
    return with_factors(known, **values)


def golden(loss: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one valley."""
    for _ in range(16):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return (low + high) / 2


def write_table() -> None:
    """Put the table of all rows between the marks of docs/cost-model.md."""
    text = DOCS.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    DOCS.write_text(f"{head}\n{table(constants())}{tail}")
    print(summary(constants()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write configs/hardware/fitted.yaml")
    parser.add_argument(
        "--table", action="store_true", help="only write the table of docs/cost-model.md anew"
    )
    args = parser.parse_args()
    if args.table:
        write_table()
        return
    known = fit(calibrate(constants()))
    for name, error in zip(known.fitted.rows, errors(known), strict=True):
        print(f"{name:22} {np.expm1(error):+.1%}")
    path = FOLDER / "fitted.yaml"
    text = path.read_text()
    for name in (*BOUNDS, "drift_common", "drift_sequence"):
        key, unit = UNITS.get(name, (name, 1.0))
        value = f"{getattr(known.fitted, name) * unit:.3f}"
        print(f"{key:22} {value}")
        text = re.sub(rf"(?m)^(  {key}: )[\d.]+", rf"\g<1>{value}", text)
    if args.write:
        path.write_text(text)


if __name__ == "__main__":
    main()
