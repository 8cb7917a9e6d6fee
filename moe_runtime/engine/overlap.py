"""Drives one or two micro-batches through the layers, stage by stage.

A layer is a generator that yields where its micro-batch waits for the network; with two
micro-batches the other one computes there. All layers have the same stages on all ranks, so
every rank issues its transfers in the same order. The order of stages is data: how many stages
the second micro-batch stays behind the first.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from moe_runtime.models.context import StepContext

# Prefill: stage by stage. Decode: two stages behind, so that attention (in two parts) of one
# micro-batch runs beside dispatch, experts and combine of the other.
PREFILL_OFFSET = 0
DECODE_OFFSET = 2


class Layer(Protocol):
    """A decoder layer: five stages, four yields (per round), the new hidden state returned."""

    def __call__(self, x_TH: Tensor, step: StepContext) -> Generator[None, None, Tensor]: ...


class Lanes(Protocol):
    """Where the stages of the micro-batches run side by side, on a device that can (`two_streams`)."""

    def both(self) -> AbstractContextManager[None]:
        """Around all stages: what came before is done before them, what comes after waits for them."""
        ...

    def stage(self, micro_batch: int) -> AbstractContextManager[None]:
        """Around the next stage of a micro-batch."""
        ...


class OneLane:
    """One stage after the other, in the order in which they are issued."""

    def both(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stage(self, micro_batch: int) -> AbstractContextManager[None]:
        return nullcontext()


ONE_LANE = OneLane()


def run(
    batches: Sequence[tuple[Tensor, StepContext]],
    layers: Sequence[Layer],
    *,
    offset: int = 0,
    lanes: Lanes = ONE_LANE,
) -> list[Tensor]:
    """COLLECTIVE: hidden states after all layers, one per micro-batch.

    With two, the second runs `offset` stages behind the first. Raises what a stage raises.
    """
    results: dict[int, Tensor] = {}
    stages = [_stages(index, x_TH, step, layers) for index, (x_TH, step) in enumerate(batches)]
    with lanes.both():
        for _ in range(offset if len(stages) > 1 else 0):
            _advance(stages, 0, results, lanes)
        while len(results) < len(stages):
            for index in range(len(stages)):
                _advance(stages, index, results, lanes)
    return [results[index] for index in range(len(stages))]


def _stages(
    micro_batch: int, x_TH: Tensor, step: StepContext, layers: Sequence[Layer]
) -> Generator[None, None, Tensor]:
    """All stages of all layers: a yield after each but the last of all."""
    for number, layer in enumerate(layers):
        stages = layer(x_TH, step)
        while True:
            step.clock.at(micro_batch, number)
            try:
                next(stages)
            except StopIteration as done:
                x_TH = done.value
                break
            yield
        if number + 1 < len(layers):
            yield
    return x_TH


def _advance(
    stages: list[Generator[None, None, Tensor]], index: int, results: dict[int, Tensor], lanes: Lanes
) -> None:
    if index in results:
        return
    with lanes.stage(index):
        try:
            next(stages[index])
        except StopIteration as done:
            results[index] = done.value
