"""What the kernels benchmark measures with: medians by events, and the rates that times are set against."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_runtime.kernels.roofline import Chip

FLUSH_BYTES = 256 * 2**20  # more than any chip's L2
SECONDS = 0.2  # of calls per measurement


class Clock:
    """Median seconds of a call: by CUDA events with a cold L2, or by the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self._cuda else 1, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Three calls to warm up, then as many as fit, 5 to 100."""
        for _ in range(3 if self._cuda else 1):
            call()
        if not self._cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        first = self._events(call, 3)
        return statistics.median(self._events(call, max(5, min(100, int(SECONDS / min(first))))))

    def _events(self, call: Callable[[], object], count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            self._flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]


def measured_chip(clock: Clock, device: torch.device, *, tiny: bool) -> Chip:
    """Rates as measured: of a large copy, of dense products in bf16 and fp8 (on a CPU twice bf16)."""
    size = 2**16 if tiny else 2**31
    source, target = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))
    bandwidth = 2 * size / clock.seconds(lambda: target.copy_(source))
    n = 64 if tiny else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * n**3 / clock.seconds(lambda: a @ b)
    fp8 = 2 * bf16
    if device.type == "cuda":
        one = torch.ones((), device=device)
        x, w = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        product = lambda: torch._scaled_mm(x, w, one, one, out_dtype=torch.bfloat16)  # noqa: E731
        fp8 = 2 * n**3 / clock.seconds(product)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Chip(name=name, bandwidth=bandwidth, bf16=bf16, fp8=fp8)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, `torch.empty` gives NaN (the largest integer for integers): what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest |got - want| over the largest |want| of its row, in double precision; infinite for NaN."""
    got64, want64 = got.double(), want.double()
    scale = want64.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((got64 - want64).abs() / scale).nan_to_num(torch.inf).max())
