"""ExpertRegistry: every tensor with an expert axis, layer by layer, as one byte range per slot.

Mover and checksums walk it; nothing else knows which tensors make up an expert. What the loader fills expert
by expert and the registry does not hold is an error when the rank starts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moe_runtime.models.layer import MoeLayer
from moe_runtime.models.moe import Experts
from moe_runtime.spec.weights import TensorTarget

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ExpertRegistry:
    """tensors[moe_layer] is (name, uint8 view [slots, bytes]) of each tensor, on the host."""

    tensors: tuple[tuple[tuple[str, Bytes], ...], ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert's tensors in a layer, the largest layer's."""
        return max(sum(int(view.shape[1]) for _, view in layer) for layer in self.tensors)

    @property
    def num_slots(self) -> int:
        """Slots of this rank in a layer."""
        return len(self.tensors[0][0][1])

    def parts(self, layer: int, slot: int) -> list[Bytes]:
        """The byte ranges of a local slot, in the order in which they travel."""
        return [view[slot] for _, view in self.tensors[layer]]

    def checksum(self, layer: int, slot: int) -> str:
        """16 hex digits over all bytes of a local slot."""
        h = hashlib.blake2b(digest_size=8)
        for part in self.parts(layer, slot):
            h.update(part.data)
        return h.hexdigest()


def register(decoder: nn.Module, targets: Sequence[TensorTarget]) -> ExpertRegistry:
    """The registry of a loaded and prepared decoder.

    `targets` are the checkpoint tensors it was filled from: a parameter that takes experts' tensors has to
    be one of an `Experts` module, or the assertion names it; so does any tensor kept beside the parameters.
    """
    layers = {
        name: module.moe.experts for name, module in decoder.named_modules() if isinstance(module, MoeLayer)
    }
    filled = {t.parameter for t in targets if t.expert is not None}
    known = {
        f"{name}.moe.experts.{p}" for name, experts in layers.items() for p, _ in experts.named_parameters()
    }
    names = {name for name, _ in decoder.named_parameters()}
    assert filled & names <= known, f"not registered, but with an expert axis: {sorted(filled - known)}"
    return ExpertRegistry(tuple(tuple(_views(experts)) for experts in layers.values()))


def _views(experts: Experts) -> list[tuple[str, Bytes]]:
    parameters = dict(experts.named_parameters())
    kept = [name for name, value in vars(experts).items() if isinstance(value, Tensor)]
    assert not kept, f"tensors {kept} of experts are no parameters, so nothing would move them"
    assert not list(experts.buffers()), "buffers of experts are not moved; make them parameters"
    slots = {len(p) for p in parameters.values()}
    assert len(slots) == 1, f"leading axes {slots} of experts' parameters are not their slots"
    return [(name, _bytes(name, p.data)) for name, p in parameters.items()]


def _bytes(name: str, tensor: Tensor) -> Bytes:
    assert tensor.is_contiguous(), f"{name} is not one byte range per slot"
    view: Bytes = tensor.view(len(tensor), -1).view(torch.uint8).numpy()
    return view
