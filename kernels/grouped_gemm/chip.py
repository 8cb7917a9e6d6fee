"""The chip a tensor lies on, as the tables of tiles know it."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moe_runtime.kernels.aot.case import GFX_942, SM_90, SM_100, Target
from moe_runtime.kernels.errors import KernelError

_CAPABILITY = {9: SM_90, 10: SM_100}


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip's kind and its number of multiprocessors."""

    target: Target
    multiprocessors: int


def chip_of(x: Tensor) -> Chip:
    """KernelError for a chip without a table. A tensor in host memory is computed by triton's interpreter."""
    if x.device.type == "cpu":
        return Chip(SM_90, 2)
    return _chip(x.device.index)


@cache
def _chip(index: int) -> Chip:
    found = torch.cuda.get_device_properties(index)
    name = getattr(found, "gcnArchName", "").partition(":")[0]
    target = GFX_942 if name == GFX_942.name else _CAPABILITY.get(0 if name else found.major)
    if target is None:
        raise KernelError(
            f"no grouped_gemm for {found.name}; there is one for sm_90, sm_100 and {GFX_942.name}"
        )
    return Chip(target, found.multi_processor_count)
