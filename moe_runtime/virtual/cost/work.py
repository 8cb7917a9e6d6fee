"""Work: seconds of kernels, split by what limits them; and the three kinds of kernel everything is made of.

Owns matrix products, grouped products and streaming kernels as functions of sizes. All formulas are plain
arithmetic, so sizes may be floats or numpy arrays. Knows machines' rates, no model and no deployment.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from moe_runtime.spec.hardware import Hardware
from moe_runtime.spec.model import DTYPE_BYTES
from moe_runtime.virtual.cost.constants import FittedFactors, KernelConstants

Number = Any  # float or float64 array: the formulas are the same
TINY = 1e-30


class Work(NamedTuple):
    """Seconds limited by arithmetic, by memory bandwidth and by kernel starts. Add with `plus`."""

    compute: Number = 0.0
    memory: Number = 0.0
    start: Number = 0.0

    @property
    def seconds(self) -> Number:
        return self.compute + self.memory + self.start

    def plus(self, *others: "Work") -> "Work":
        compute, memory, start = self
        for other in others:
            compute, memory, start = compute + other[0], memory + other[1], start + other[2]
        return Work(compute, memory, start)

    def times(self, factor: Number) -> "Work":
        return Work(self.compute * factor, self.memory * factor, self.start * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What kernels reach on one device.

    available  share of the multiprocessors that compute has: below 1 beside normal-mode transfers
    """

    hardware: Hardware
    kernels: KernelConstants
    fitted: FittedFactors
    available: float = 1.0

    def with_available(self, share: float) -> Self:
        return type(self)(hardware=self.hardware, kernels=self.kernels, fitted=self.fitted, available=share)

    @property
    def bandwidth(self) -> float:
        return self.hardware.memory_bandwidth

    def peak(self, dtype: str) -> float:
        """Dense peak of the available multiprocessors, flop/s. KeyError if there is no such rate."""
        return self.hardware.flops[dtype] * self.available

    def roofline(self, compute: Number, memory: Number, start: float) -> Work:
        """A kernel that needs `compute` seconds of arithmetic and `memory` seconds of traffic.

        Between the two limits kernels lose both a little: the p-norm of the two.
        """
        p = self.kernels.power
        c, m = compute**p, memory**p + TINY**p
        body = (c + m) ** (1 / p)
        share = c / (c + m)
        return Work(body * share, body * (1 - share), start)

    def _product_rate(self, k: int, dtype: str) -> float:
        """flop/s of a product over k values: to fill and drain a tile costs as much as `half_k` bytes."""
        depth = k * value_bytes(dtype)
        return self.peak(dtype) * self.kernels.best_share * depth / (depth + self.kernels.half_k)

    def gemm(self, rows: Number, n: int, k: int, dtype: str, *, count: int = 1) -> Work:
        """`count` products [rows, k] x [k, n] in one kernel, all in `dtype`, outputs two bytes."""
        kc = self.kernels
        size = value_bytes(dtype)
        rate = self._product_rate(k, dtype)
        flops = 2.0 * count * rows * n * k
        traffic = float(count) * (n * k * size + rows * (k * size + n * 2))
        return self.roofline(flops / rate, traffic / (self.bandwidth * kc.memory_share), kc.start)

    def grouped_gemm(self, rows: Number, groups: float, n: int, k: int, dtype: str, tile: int) -> Work:
        """`groups` products whose rows sum to `rows`: each group fills whole tiles, each weight is read once.

        With m rows per group on average (counts nearly Poisson), a group is there with probability
        1 - exp(-m) and wastes half a tile.
        """
        kc = self.kernels
        size = value_bytes(dtype)
        active = groups * (1 - _exp(-rows / groups))
        rate = self._product_rate(k, dtype)
        flops = 2.0 * (rows + active * tile / 2) * n * k
        traffic = active * n * k * size + rows * (k * size + n * 2.0)
        return self.roofline(flops / rate, traffic / (self.bandwidth * kc.memory_share), kc.start)

    def stream(self, traffic: Number, kernels: int) -> Work:
        """`kernels` small kernels that move `traffic` bytes of memory together."""
        rate = self.bandwidth * self.kernels.elementwise_share
        return Work(0.0, traffic / rate, kernels * self.fitted.kernel_start)


def value_bytes(dtype: str) -> float:
    """Bytes of a value in memory; 8-bit floats carry a float32 scale per 128."""
    if dtype == "float8_e4m3":
        return 1 + 4 / 128
    if dtype == "float4_e2m1":
        return 0.5 + 1 / 16
    return float(DTYPE_BYTES[dtype])


def _exp(x: Number) -> Number:
    return 2.718281828459045**x
