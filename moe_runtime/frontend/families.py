"""Families of metrics on their way from one frontend to another: packed, merged, and written for Prometheus.

A family is written once, with the samples of all frontends; that no two of them have equal labels is up
to those who make them.
"""

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class _Family(msgspec.Struct, frozen=True, array_like=True):
    """Samples are (name, labels, value)."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


_FAMILIES = msgspec.msgpack.Decoder(list[_Family])


def pack(families: Iterable[Metric]) -> bytes:
    """Families as bytes."""
    packed = [
        _Family(
            f.name, f.documentation, f.type, [(s.name, dict(s.labels), float(s.value)) for s in f.samples]
        )
        for f in families
    ]
    return msgspec.msgpack.encode(packed)


def write(packed: Iterable[bytes]) -> bytes:
    """The text that /metrics answers with: all families of all frontends."""
    merged: dict[tuple[str, str], Metric] = {}
    for body in packed:
        for family in _FAMILIES.decode(body):
            key = (family.name, family.type)
            metric = merged.get(key)
            if metric is None:
                metric = merged[key] = Metric(family.name, family.help, family.type)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
    return generate_latest(_Collected(merged.values()))


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
