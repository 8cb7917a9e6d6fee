"""Hardware entries a plan may name: memory, peak rates and links of one device.

Pure data, in bytes, bytes per second and floating point operations per second. Knows nothing
of plans; the memory budget, the cost model and the report read the same table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

GB = 10**9
TERA = 1e12

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, or a whole CPU host.

    device             what `cluster.device` must be to use it ("cuda" includes ROCm, as in torch)
    memory_bytes       of the device; of a CPU host, shared by all ranks on it
    memory_bandwidth   bytes/s
    flops              dense peak by dtype, without sparsity; a dtype it lacks is absent
    scaleup_bandwidth  bytes/s per device and direction inside a scale-up domain
    scaleup_world      devices of a scale-up domain
    rdma_bandwidth     bytes/s per device and direction between nodes; None: the source has none
    source             where the numbers come from
    """

    name: str
    device: Device
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    scaleup_bandwidth: float
    scaleup_world: int
    rdma_bandwidth: float | None
    source: str


_CPU_HOST = Hardware(
    name="cpu-host",
    device="cpu",
    memory_bytes=16 * 2**30,
    memory_bandwidth=19.0 * GB,
    flops=MappingProxyType({"float32": 70.0 * GB, "bfloat16": 1.0 * GB}),
    scaleup_bandwidth=19.0 * GB,
    scaleup_world=1024,
    rdma_bandwidth=None,
    source="nominal: torch.mm and a sum, measured on two cores without bfloat16 instructions;"
    " memory is a stand-in for the host's own",
)

# name, memory GB, TB/s, fp4 / fp8 / bf16 dense Tflop/s, scale-up GB/s, its world, RDMA GB/s
_GPUS: tuple[tuple[str, int, float, int | None, int, int, int, int, int | None], ...] = (
    ("h100-sxm", 80, 3.35, None, 1979, 989, 450, 8, 50),
    ("h200-sxm", 141, 4.8, None, 1979, 989, 450, 8, 50),
    ("h800", 80, 3.35, None, 1979, 989, 200, 8, 50),
    ("h20-96g", 96, 4.0, None, 296, 148, 450, 8, 25),
    ("b200-sxm", 180, 8.0, 9000, 4500, 2250, 900, 8, 50),
    ("b300-sxm", 268, 8.0, 13500, 4500, 2250, 900, 8, 100),
    ("gb200-nvl72", 192, 8.0, 10000, 5000, 2500, 900, 72, None),
    ("gb300-nvl72", 288, 8.0, 15000, 5000, 2500, 900, 72, None),
    ("mi300x", 192, 5.3, None, 2615, 1307, 448, 8, 50),
    ("mi325x", 256, 6.0, None, 2615, 1307, 448, 8, 50),
    ("mi355x", 288, 8.0, 10066, 5033, 2516, 576, 8, 50),
)


def _gpus() -> Iterator[Hardware]:
    for name, memory, bandwidth, fp4, fp8, bf16, scaleup, world, rdma in _GPUS:
        flops = {"bfloat16": bf16 * TERA, "float16": bf16 * TERA, "float8_e4m3": fp8 * TERA}
        if fp4 is not None:
            flops["float4_e2m1"] = fp4 * TERA
        yield Hardware(
            name=name,
            device="cuda",
            memory_bytes=memory * GB,
            memory_bandwidth=bandwidth * TERA,
            flops=MappingProxyType(flops),
            scaleup_bandwidth=scaleup * GB,
            scaleup_world=world,
            rdma_bandwidth=None if rdma is None else rdma * GB,
            source="vendor's datasheet, dense rates",
        )


HARDWARE: Mapping[str, Hardware] = MappingProxyType({entry.name: entry for entry in (_CPU_HOST, *_gpus())})
