"""Seeded sequences of windows of load, to try policies on: noise that reverts to a mean, changes of topic."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def reverting(
    base_LE: NDArray[np.float64],
    *,
    noise: float,
    memory: float,
    windows: int,
    seed: int,
    pairs: float = 1e6,
) -> Iterator[NDArray[np.float64]]:
    """`windows` windows of about `pairs` pairs a layer, float64 [L, E].

    Each expert's load is its base times exp(x), x normal with standard deviation `noise` and correlation
    `memory` from one window to the next (a discrete Ornstein-Uhlenbeck process, started in equilibrium).
    """
    rng = np.random.default_rng(seed)
    x_LE = rng.normal(0, noise, base_LE.shape)
    for _ in range(windows):
        load_LE = base_LE * np.exp(x_LE - noise**2 / 2)
        yield load_LE * (pairs / load_LE.sum(axis=1, keepdims=True))
        x_LE = memory * x_LE + np.sqrt(1 - memory**2) * rng.normal(0, noise, base_LE.shape)


def other_topic(base_LE: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """The same skew on other experts: each layer's loads permuted."""
    return np.random.default_rng(seed).permuted(base_LE, axis=1)


def switching(
    base_LE: NDArray[np.float64], *, noise: float, memory: float, windows: int, every: int, seed: int
) -> Iterator[NDArray[np.float64]]:
    """As `reverting`, with the topic changing after every `every` windows."""
    for part, begin in enumerate(range(0, windows, every)):
        topic = base_LE if part == 0 else other_topic(base_LE, seed + part)
        count = min(every, windows - begin)
        yield from reverting(topic, noise=noise, memory=memory, windows=count, seed=seed + 1000 + part)
