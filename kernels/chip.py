"""The chip a tensor lies on, as kernels choose their tiles by it."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moe_runtime.kernels.aot.case import GFX_942, SM_90, SM_100, TARGETS, Target
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


def require_kernels(device: torch.device) -> None:
    """KernelError for a chip without a table: to be asked before weights are read."""
    if device.type == "cuda":
        _chip(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _chip(index: int) -> Chip:
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:  # where gcnArchName is the name of the device
        target = _CAPABILITY.get(found.major)
    else:
        target = GFX_942 if found.gcnArchName.partition(":")[0] == GFX_942.name else None
    if target is None:
        raise KernelError(f"no kernels for {found.name}: they are for {', '.join(t.name for t in TARGETS)}")
    return Chip(target, found.multi_processor_count)
