"""Adapter: what the three DeepEP adapters have in common, from the check of their limits to their end."""

from typing import Any, ClassVar

from torch import Tensor

from moe_runtime.expert_parallel.buffer import CombineOrder
from moe_runtime.expert_parallel.deepep.library import Library
from moe_runtime.expert_parallel.deepep.meter import DeviceMeter
from moe_runtime.expert_parallel.deepep.shape import Mode, Shape


class Adapter:
    """A DeepEP buffer behind the contract of `buffer.Buffer`; subclasses make `_buffer` and the calls."""

    combine_order: ClassVar[CombineOrder] = "backend"
    mode: ClassVar[Mode]
    _buffer: Any

    def __init__(self, library: Library, shape: Shape, *, group: Any, meter: DeviceMeter | None) -> None:
        """LOCAL. `group` is what DeepEP takes. PlanError names every limit that `shape` breaks."""
        shape.require(self.mode)
        self.shape, self.rank = shape, group.rank()
        self.meter = meter or DeviceMeter()
        self._library = library

    def _topk_idx(self, slot_ids_TK: Tensor) -> Tensor:
        """Slot ids in the dtype this build takes."""
        return slot_ids_TK.to(self._library.topk_idx_dtype).contiguous()

    def close(self) -> None:
        """Give DeepEP's memory back; the buffer is unusable afterwards."""
        self._buffer.destroy()
