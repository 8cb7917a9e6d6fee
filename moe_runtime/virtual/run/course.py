"""Course: expert loads that change while a simulation runs, as its script says.

Owns what `to` of a load shift means, and how shifts and drifts make the loads at a moment: the traffic's mean
loads are those of the newest shift, and every drift under way multiplies them. L MoE layers, E experts.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from moe_runtime.eplb.drift import other_topic, reverting
from moe_runtime.eplb.load_files import LoadFileError, read_load
from moe_runtime.errors import InputError
from moe_runtime.report.records import F64
from moe_runtime.virtual.run.loads import FORMS, LoadChoice, expert_loads, with_shared
from moe_runtime.virtual.run.prepare import Prepared

ALL = "all"  # deployments
START, TOPIC = "start", "topic"
ENDINGS = (".csv", ".json", ".npz", ".npy", ".pt")
TARGETS = f"{START}, {TOPIC}:NUMBER, {FORMS}, or a file of loads ({', '.join(ENDINGS)})"
LARGEST_TOPIC = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShift:
    """From `at` on, a share `mix` of a deployment's traffic has other expert loads; all: of every one's.

    to     one of TARGETS; a file's path is whole
    where  of the script, for messages
    """

    deployment: str
    at: float
    to: str
    mix: float = 1.0
    where: str = ""

    def of(self, deployment: str) -> bool:
        return self.deployment in (deployment, ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDrift:
    """Within [start, end), every `every` seconds each expert's load is its mean times exp(x).

    noise        standard deviation of x
    correlation  of x with what it was `every` seconds before
    """

    deployment: str
    start: float
    end: float
    every: float
    noise: float
    correlation: float
    seed: int = 0

    def of(self, deployment: str) -> bool:
        return self.deployment in (deployment, ALL)

    @property
    def windows(self) -> int:
        return int(np.ceil((self.end - self.start) / self.every - 1e-9))


@dataclass(frozen=True, slots=True)
class _Change:
    """At a moment: other mean loads, or another factor of drift number `drift`; None: it is over."""

    at: float
    mean_LE: F64 | None = None
    drift: int = -1
    factor_LE: F64 | None = None


def course(
    prepared: Prepared, shifts: Sequence[LoadShift], drifts: Sequence[LoadDrift]
) -> Iterator[tuple[float, F64]]:
    """(time, loads float64 [L, E] from then on), in order of time. InputError at once for what cannot be."""
    start_LE = _routed(prepared)
    in_order = sorted(shifts, key=lambda s: s.at)
    means, now_LE = [], start_LE
    for shift in in_order:
        target_LE = target_loads(shift, prepared)
        now_LE = (1 - shift.mix) * _shares(now_LE) + shift.mix * _shares(target_LE)
        means.append(_Change(shift.at, mean_LE=now_LE))
    return _merged(
        prepared, start_LE, [iter(means), *(_windows(i, d, start_LE) for i, d in enumerate(drifts))]
    )


def target_loads(shift: LoadShift, prepared: Prepared) -> F64:
    """float64 [L, routed experts]: what `shift.to` names. InputError where it names nothing."""
    model, start_LE = prepared.model, _routed(prepared)
    kind, colon, number = shift.to.partition(":")
    if shift.to == START:
        return start_LE
    if kind == TOPIC and colon:
        if not number.isdecimal() or int(number) > LARGEST_TOPIC:
            raise InputError(f"{shift.where}: to is {shift.to!r}: a topic has a number up to {LARGEST_TOPIC}")
        return other_topic(start_LE, int(number))
    path = Path(shift.to)
    if path.suffix.lower() in ENDINGS:
        try:
            load_LE = read_load(path)
        except LoadFileError as error:
            raise InputError(f"{shift.where}: to: {error}") from error
        if load_LE.shape != start_LE.shape or not load_LE.sum(axis=1).all():
            raise InputError(
                f"{shift.where}: to: {path} has loads {list(load_LE.shape)}; the model's MoE layers and"
                f" experts are {list(start_LE.shape)}, and every layer must have some"
            )
        return load_LE
    try:
        choice = LoadChoice.parse(shift.to)
        ranks = prepared.deployment.expert_parallel
        load_LE = expert_loads(choice, model, role=prepared.deployment.name, ranks=ranks, seed=0)
    except InputError as error:
        raise InputError(f"{shift.where}: to is {shift.to!r}: must be {TARGETS}; as {error}") from error
    return load_LE[:, : model.moe.num_experts]


def _merged(
    prepared: Prepared, start_LE: F64, streams: Sequence[Iterator[_Change]]
) -> Iterator[tuple[float, F64]]:
    mean_LE, factors = start_LE, dict[int, F64]()
    for at, changes in groupby(heapq.merge(*streams, key=lambda c: c.at), key=lambda c: c.at):
        for change in changes:
            if change.mean_LE is not None:
                mean_LE = change.mean_LE
            elif change.factor_LE is not None:
                factors[change.drift] = change.factor_LE
            else:
                factors.pop(change.drift, None)
        load_LE = mean_LE
        for factor_LE in factors.values():
            load_LE = load_LE * factor_LE
        yield at, with_shared(_shares(load_LE), prepared.model)


def _windows(index: int, drift: LoadDrift, like_LE: F64) -> Iterator[_Change]:
    factors = reverting(
        np.ones_like(like_LE),
        noise=drift.noise,
        memory=drift.correlation,
        windows=drift.windows,
        seed=drift.seed,
        pairs=like_LE.shape[1],
    )
    for window, factor_LE in enumerate(factors):
        yield _Change(drift.start + window * drift.every, drift=index, factor_LE=factor_LE)
    yield _Change(drift.end, drift=index)


def _routed(prepared: Prepared) -> F64:
    """Loads at the start, without shared experts in slots."""
    return prepared.assumed.load_LE[:, : prepared.model.moe.num_experts]


def _shares(load_LE: F64) -> F64:
    share_LE: F64 = load_LE / load_LE.sum(axis=1, keepdims=True)
    return share_LE
