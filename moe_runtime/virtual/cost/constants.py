"""The constants of the cost model: read from configs/hardware/*.yaml, checked, frozen.

Owns the YAML files' format. kernels.yaml: shares of datasheet rates; fitted.yaml: the fitted factors;
links.yaml: published tables of transfer libraries; machines.yaml: what a machine adds to its datasheet
row in `spec.hardware`. Every block says where its numbers come from. No formula here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import yaml

from moe_runtime.errors import InputError
from moe_runtime.plan.problems import nearest
from moe_runtime.spec.hardware import HARDWARE, Hardware

FOLDER = Path(__file__).resolve().parent.parent / "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConstants:
    """Shares of datasheet rates that kernels reach; see kernels.yaml for each one's source."""

    best_share: float
    half_k: float
    memory_share: float
    power: float
    start: float
    dense_tile: int
    grouped_tile: int
    decode_compute_share: float
    decode_memory_share: float
    prefill_compute_share: float
    prefill_tile: int
    elementwise_share: float
    copy_start: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedFactors:
    """The factors fitted on whole-deployment figures: five. `rows` are what they were fitted on.

    kernel_start      seconds, floor of each small kernel of a layer
    normal_start      seconds of a normal-mode transfer whatever its size: layout, counts, a barrier over all
                      ranks, hosts that launch it at different times
    normal_transfers  time of normal-mode transfers' bytes beside computation over that without
    drift_common, drift_sequence  how far an expert's load strays from step to step, see `balance.Drift`
    """

    kernel_start: float
    normal_start: float
    normal_transfers: float
    drift_common: float
    drift_sequence: float
    rows: tuple[str, ...] = ()

    @classmethod
    def from_yaml(cls, data: Mapping[str, Any]) -> Self:
        values = {name: float(value) for name, value in data["factors"].items()}
        values["kernel_start"] = values.pop("kernel_start_us") * 1e-6
        values["normal_start"] = values.pop("normal_start_us") * 1e-6
        return cls(rows=tuple(data["rows"]), **values)

    def changed(self, **values: Any) -> Self:
        """The factors with some replaced: for the fit and for what-if questions."""
        return replace(self, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyTable:
    """A published table of low-latency dispatch and combine times: seconds by EP degree.

    Measured with `tokens` tokens a rank, `top_k` rows each, over `rdma` and `scaleup` bytes/s.
    `scaleup_used`: ranks of a node exchange over the scale-up links, not over RDMA.
    """

    tokens: int
    top_k: int
    hidden: int
    rdma: float
    scaleup: float
    scaleup_used: bool
    scaleup_measured_share: float
    dispatch: tuple[tuple[int, float], ...]
    combine: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalTable:
    """Normal-mode transfers: RDMA and scale-up copies in a pipeline.

    scaleup     bytes/s of scale-up copies (dispatch, combine), measured inside one node
    pipelining  exponent p of (rdma^p + scaleup^p)^(1/p), fitted on `measured`
    measured    EP degree -> (dispatch, combine) bytes/s, a row per distinct node counted
    """

    scaleup: tuple[float, float]
    pipelining: float
    measured: tuple[tuple[int, float, float], ...]
    multiprocessors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSidedTable:
    """All-to-all inside one large scale-up domain: start seconds by EP degree, share of the line rate."""

    share: float
    dispatch: tuple[tuple[int, float], ...]
    combine: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConstants:
    """All-reduces and bulk copies: shares of line rates, start seconds."""

    scaleup_share: float
    node_start: float
    network_start: float
    bulk_share: float
    bulk_start: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """How rows travel: one version of a transfer library, with its published tables."""

    name: str
    source: str
    low_latency: LowLatencyTable
    normal: NormalTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device with what the datasheet row of `spec.hardware` does not say.

    multiprocessors  SMs or compute units, of which normal-mode transfers take some
    library          default transfer library between nodes
    """

    hardware: Hardware
    multiprocessors: int
    library: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All of them."""

    kernels: KernelConstants
    fitted: FittedFactors
    libraries: Mapping[str, Library]
    one_sided: OneSidedTable
    collective: CollectiveConstants
    machines: Mapping[str, Machine]

    def machine(self, name: str) -> Machine:
        """The machine of a name. InputError with the nearest name, or with those there are."""
        if name not in self.machines:
            near = nearest(name, self.machines)
            known = f"one of {', '.join(self.machines)}" if near is None else f"did you mean {near}?"
            raise InputError(f"machine {name!r}: {known}")
        return self.machines[name]


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; InputError naming the file otherwise."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: a mapping was expected")
    return data


@cache
def constants(folder: Path = FOLDER) -> Constants:
    """Read and check the files of a folder. InputError names the file and what is wrong with it."""
    kernels, links = read_yaml(folder / "kernels.yaml"), read_yaml(folder / "links.yaml")
    fitted, machines = read_yaml(folder / "fitted.yaml"), read_yaml(folder / "machines.yaml")
    try:
        return Constants(
            kernels=_kernels(kernels),
            fitted=FittedFactors.from_yaml(fitted),
            libraries=MappingProxyType({n: _library(n, d) for n, d in links["libraries"].items()}),
            one_sided=OneSidedTable(
                share=float(links["one_sided"]["share"]),
                dispatch=_curve(links["one_sided"]["start_us"], 0),
                combine=_curve(links["one_sided"]["start_us"], 1),
            ),
            collective=CollectiveConstants(
                scaleup_share=float(links["collective"]["scaleup_share"]),
                node_start=float(links["collective"]["start_us"]["node"]) * 1e-6,
                network_start=float(links["collective"]["start_us"]["network"]) * 1e-6,
                bulk_share=float(links["bulk"]["rdma_share"]),
                bulk_start=float(links["bulk"]["start_us"]) * 1e-6,
            ),
            machines=MappingProxyType({n: _machine(n, d) for n, d in machines["machines"].items()}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: wrong or missing entry: {error!r}") from error


def _kernels(data: Mapping[str, Any]) -> KernelConstants:
    gemm, decode, prefill = data["gemm"], data["decode_attention"], data["prefill_attention"]
    return KernelConstants(
        best_share=float(gemm["best_share"]),
        half_k=float(gemm["half_k_bytes"]),
        memory_share=float(gemm["memory_share"]),
        power=float(gemm["power"]),
        start=float(gemm["start_us"]) * 1e-6,
        dense_tile=int(gemm["dense_tile"]),
        grouped_tile=int(gemm["grouped_tile"]),
        decode_compute_share=float(decode["compute_share"]),
        decode_memory_share=float(decode["memory_share"]),
        prefill_compute_share=float(prefill["compute_share"]),
        prefill_tile=int(prefill["tile"]),
        elementwise_share=float(data["elementwise"]["memory_share"]),
        copy_start=float(data["low_latency_copies"]["start_us"]) * 1e-6,
    )


def _library(name: str, data: Mapping[str, Any]) -> Library:
    low, normal = data["low_latency"], data["normal"]
    return Library(
        name=name,
        source=str(data["source"]),
        low_latency=LowLatencyTable(
            tokens=int(low["tokens"]),
            top_k=int(low["top_k"]),
            hidden=int(low["hidden"]),
            rdma=float(low["rdma_GBps"]) * 1e9,
            scaleup=float(low["scaleup_GBps"]) * 1e9,
            scaleup_used=bool(low["scaleup_used"]),
            scaleup_measured_share=float(low["scaleup_share"]),
            dispatch=_curve(low["us"], 0),
            combine=_curve(low["us"], 1),
        ),
        normal=NormalTable(
            scaleup=(normal["scaleup"][0] * 1e9, normal["scaleup"][1] * 1e9),
            pipelining=float(normal["pipelining"]),
            measured=tuple((int(r), d * 1e9, c * 1e9) for r, (d, c) in sorted(normal["measured"].items())),
            multiprocessors=int(normal["multiprocessors"]),
        ),
    )


def _curve(table: Mapping[int, Any], column: int) -> tuple[tuple[int, float], ...]:
    """(EP degree, seconds) pairs of a table EP degree -> [dispatch us, combine us]."""
    return tuple((int(r), float(row[column]) * 1e-6) for r, row in sorted(table.items()))


def _machine(name: str, data: Mapping[str, Any]) -> Machine:
    return Machine(
        hardware=HARDWARE[name],
        multiprocessors=int(data["multiprocessors"]),
        library=str(data["library"]),
    )
