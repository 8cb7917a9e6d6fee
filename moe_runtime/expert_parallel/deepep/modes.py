"""The DeepEP buffers of an instance: one per dispatch mode that its steps may run in.

Each mode has a DeepEP `Buffer` of its own: one that changes modes has to be cleaned in between.
"""

from collections.abc import Iterable
from typing import Any

from moe_runtime.expert_parallel.deepep.library import Library
from moe_runtime.expert_parallel.deepep.low_latency import LowLatencyBuffer
from moe_runtime.expert_parallel.deepep.meter import DeviceMeter
from moe_runtime.expert_parallel.deepep.normal import NormalBuffer
from moe_runtime.expert_parallel.deepep.shape import Shape
from moe_runtime.spec.limits import DispatchMode


def open_buffers(
    library: Library, shape: Shape, *, group: Any, modes: Iterable[DispatchMode], masking: bool = False
) -> dict[DispatchMode, NormalBuffer | LowLatencyBuffer]:
    """COLLECTIVE: the buffers of `modes`, in their order, with one meter; errors as of the two classes."""
    meter = DeviceMeter()
    return {
        mode: NormalBuffer(library, shape, group=group, meter=meter)
        if mode == "normal"
        else LowLatencyBuffer(library, shape, group=group, masking=masking, meter=meter)
        for mode in modes
    }
