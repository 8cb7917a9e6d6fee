"""Drives the generators of one or two micro-batches through the layers.

A layer yields where its micro-batch waits for the network; with one micro-batch there is
nothing else to run meanwhile, and the generator is simply driven to its end.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from moe_runtime.models.context import StepContext


class Layer(Protocol):
    """A decoder layer: five stages, four yields (per round), the new hidden state returned."""

    def __call__(self, x_TH: Tensor, step: StepContext) -> Generator[None, None, Tensor]: ...


def run(batches: Sequence[tuple[Tensor, StepContext]], layers: Iterable[Layer]) -> list[Tensor]:
    """COLLECTIVE: hidden states after all layers, one per micro-batch."""
    assert len(batches) == 1, "two micro-batches come with the overlap schedule"
    x_TH, step = batches[0]
    for layer in layers:
        x_TH = drive(layer(x_TH, step))
    return [x_TH]


def drive(stages: Generator[None, None, Tensor]) -> Tensor:
    """Run a layer's stages one after the other."""
    while True:
        try:
            next(stages)
        except StopIteration as done:
            result: Tensor = done.value
            return result
