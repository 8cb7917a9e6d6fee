"""Every rank of an instance by itself, layer by layer: what the lanes of the cost model stand for.

L layers, R ranks, two micro-batches. Experts' seconds and transfers differ from layer to layer and rank to
rank; a rank waits for nothing but its own lanes and for rows that others send it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_runtime.virtual.cost.lanes import DECODE, EXPERTS, PREFILL, SECOND, Stages, Transfer

Array = NDArray[np.float64]


class Loads(NamedTuple):
    """Heat of micro-batch, layer and rank over the mean, [2, L, R]: experts and transfers grow with it."""

    heat: Array

    @classmethod
    def draw(cls, *, layers: int, ranks: int, hottest: float, seed: int) -> "Loads":
        """Another rank of `hottest` times the mean in each layer, the same one for both micro-batches."""
        rng = np.random.default_rng(seed)
        heat = rng.lognormal(0.0, 0.1, (2, layers, ranks))
        heat[:, np.arange(layers), rng.integers(0, ranks, layers)] = hottest
        return cls(heat / heat.mean(axis=2, keepdims=True))

    @property
    def most(self) -> Array:
        """[2, L]"""
        heat: Array = self.heat.max(axis=2)
        return heat


def heaviest(mean: Stages, heat: float) -> Stages:
    """Stages of the rank with most rows, where the mean rank has `mean`: what lanes make of a layer."""
    return mean._replace(
        dispatch=Transfer(mean.dispatch.send, mean.dispatch.receive * heat),
        combine=Transfer(mean.combine.send * heat, mean.combine.receive),
        heaviest=mean.experts * heat,
    )


def prefill_layer(mean: Stages, loads: Loads) -> float:
    """Mean seconds of a layer. A transfer begins when all ranks take part and ends everywhere at once."""
    compute_R, lane = np.zeros(loads.heat.shape[2]), 0.0
    arrived, ends = [0.0, 0.0], []
    for heat_BR, most_B in zip(loads.heat.swapaxes(0, 1), loads.most.T, strict=True):
        for batch, stage in PREFILL:
            if stage >= EXPERTS:
                compute_R = np.maximum(compute_R, arrived[batch])
            compute_R = compute_R + mean.compute[stage] * (heat_BR[batch] if stage == EXPERTS else 1.0)
            if stage in (SECOND, EXPERTS):
                transfer = mean.dispatch if stage == SECOND else mean.combine
                lane = max(lane, compute_R.max()) + transfer.seconds * most_B[batch]
                arrived[batch] = lane
        ends.append(compute_R.mean())
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def decode_layer(mean: Stages, loads: Loads) -> float:
    """Mean seconds of a layer. Each rank sends when it is ready, and has what it needs when all have sent."""
    compute_R = sent_R = received_R = np.zeros(loads.heat.shape[2])
    arrived, ends = [compute_R, compute_R], []
    for heat_BR in loads.heat.swapaxes(0, 1):
        for batch, stage in DECODE:
            hot_R = heat_BR[batch]
            if stage >= EXPERTS:
                compute_R = np.maximum(compute_R, arrived[batch])
            compute_R = compute_R + mean.compute[stage] * (hot_R if stage == EXPERTS else 1.0)
            if stage in (SECOND, EXPERTS):
                out = stage == SECOND
                send, receive = mean.dispatch if out else mean.combine
                sent_R = np.maximum(sent_R, compute_R) + send * (1.0 if out else hot_R)
                received_R = np.maximum(received_R, compute_R.min()) + receive * (hot_R if out else 1.0)
                arrived[batch] = np.maximum(received_R, sent_R.max())
        ends.append(compute_R.mean())
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def slowed_layer(stages: Stages, start: float, slowed: float, *, layers: int, tick: float) -> float:
    """Mean seconds of a layer of one rank, by small ticks: bytes travel slower while there is compute."""
    tasks = [(batch, stage) for _ in range(layers) for batch, stage in PREFILL]
    transfers: list[list[float]] = []  # [micro-batch, start left, bytes left]
    now, left, marks, at = 0.0, stages.compute[tasks[0][1]], [0.0], 0
    while at < len(tasks):
        batch, stage = tasks[at]
        waits = stage >= EXPERTS and any(job[0] == batch for job in transfers)
        if transfers:
            job = transfers[0]
            if job[1] > 0:
                job[1] -= tick
            else:
                job[2] -= tick if waits else tick / slowed
            if job[1] <= 0 and job[2] <= 0:
                transfers.pop(0)
        now += tick
        left -= 0.0 if waits else tick
        if left <= 0:
            if stage in (SECOND, EXPERTS):
                transfer = stages.dispatch if stage == SECOND else stages.combine
                transfers.append([batch, start, transfer.seconds - start])
            at += 1
            left += stages.compute[tasks[at][1]] if at < len(tasks) else 0.0
            if at % len(PREFILL) == 0:
                marks.append(now)
    return (marks[-1] - marks[1]) / (layers - 1)
