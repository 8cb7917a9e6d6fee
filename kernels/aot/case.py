"""What one ahead-of-time compilation is: a kernel, its types and constants, and what must come out.

Every `triton.py` offers `aot_cases(target)`, all configurations that its launcher can choose for
the shapes of `kernels/shapes.py` on that target; `python -m moe_runtime.kernels.aot` compiles them.
This module knows neither triton nor any kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Matrix = Literal["none", "bf16", "fp8", "small"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A chip: triton's name for it and its limits.

    shared_bytes   the most shared memory of one program
    fp8            triton's name of the chip's e4m3 type (gfx942 has the fnuz variant)
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp: int
    shared_bytes: int
    fp8: str
    tensor_descriptors: bool


SM_90 = Target(
    name="sm_90",
    backend="cuda",
    arch=90,
    warp=32,
    shared_bytes=232_448,
    fp8="fp8e4nv",
    tensor_descriptors=True,
)
SM_100 = Target(
    name="sm_100",
    backend="cuda",
    arch=100,
    warp=32,
    shared_bytes=232_448,
    fp8="fp8e4nv",
    tensor_descriptors=True,
)
GFX_942 = Target(
    name="gfx942",
    backend="hip",
    arch="gfx942",
    warp=64,
    shared_bytes=65_536,
    fp8="fp8e4b8",
    tensor_descriptors=False,
)
TARGETS = (SM_90, SM_100, GFX_942)


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One kernel in one configuration.

    operation      the folder it lies in
    label          what distinguishes this configuration in the table: "decode 7168x4096 16x128x128"
    kernel         the undecorated-by-autotune `triton.jit` function
    signature      argument -> triton type ("*bf16", "i32", "tensordesc<bf16[64,64]>"), constants left out
    constants      argument -> compile-time value
    aligned        arguments (pointers and strides together) known to be multiples of 16
    num_warps, num_stages
    fp_fusion      whether the launcher lets products and sums fuse into one rounding
    matrix         the matrix instruction its main loop must use: none, bf16 (wgmma / tcgen05 / mfma),
                   fp8 (the fp8 form of it), small (tiles too small for those; mma.sync allowed)
    streams        True if its main loop (or all of it, without one) must load 16 bytes at a time or by TMA
    representative True for the subset that the test suite compiles
    """

    operation: str
    label: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = True
    matrix: Matrix = "none"
    streams: bool = False
    representative: bool = False
