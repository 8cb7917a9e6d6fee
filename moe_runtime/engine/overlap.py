"""Drives one or two micro-batches through the layers, stage by stage.

A layer is a generator that may be left where its micro-batch waits for the network; with two
micro-batches the other one computes there. Both go through the same layers in the same order, so
every rank issues its transfers in the same order. The order is data: at which places the
micro-batches take turns, and how many stages the second stays behind the first.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from moe_runtime.models.context import StepContext, Transfer
from moe_runtime.models.layer import Cut


@dataclass(frozen=True, slots=True)
class Order:
    """Who runs when.

    cuts           where a stage ends ("layer": with each layer)
    behind         how many stages the second micro-batch stays behind the first
    shared_beside  the transfer beside which the shared experts run
    """

    cuts: frozenset[Cut | Literal["layer"]]
    behind: int
    shared_beside: Transfer


# Both as published for DeepSeek-V3.
# Prefill: two stages a layer, up to the dispatch and up to the combine. One's rows travel beside the other's
# attention, its results, which are larger, beside the other's experts and its own shared experts; whoever
# has its results back goes on with the next layer. Dense layers before the first dispatch are run by one
# micro-batch while the other's rows travel.
PREFILL = Order(frozenset({"dispatch", "combine"}), behind=0, shared_beside="combine")
# Decode: two of five stages behind, so that attention (in two parts) of one micro-batch runs beside dispatch,
# experts and combine of the other.
DECODE = Order(
    frozenset({"attention", "dispatch", "shared", "combine", "layer"}), behind=2, shared_beside="dispatch"
)


def order_of(*, decode_only: bool) -> Order:
    """The order of a step, by its agreed kind."""
    return DECODE if decode_only else PREFILL


class Layer(Protocol):
    """A decoder layer: yields the places where it may be left, and returns the new hidden state."""

    def __call__(self, x_TH: Tensor, step: StepContext) -> Generator[Cut, None, Tensor]: ...


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
    order: Order = PREFILL,
    lanes: Lanes = ONE_LANE,
) -> list[Tensor]:
    """COLLECTIVE: hidden states after all layers, one per micro-batch.

    With two, they take turns in `order`, which also says beside what each step's shared experts run. Raises
    what a stage raises.
    """
    for _, step in batches:
        step.shared_beside = order.shared_beside
    results: dict[int, Tensor] = {}
    stages = [_stages(index, x_TH, step, layers, order) for index, (x_TH, step) in enumerate(batches)]
    with lanes.both():
        for _ in range(order.behind if len(stages) > 1 else 0):
            _advance(stages, 0, results, lanes)
        while len(results) < len(stages):
            for index in range(len(stages)):
                _advance(stages, index, results, lanes)
    return [results[index] for index in range(len(stages))]


def _stages(
    micro_batch: int, x_TH: Tensor, step: StepContext, layers: Sequence[Layer], order: Order
) -> Generator[None, None, Tensor]:
    """All stages of all layers: a yield after each but the last of all."""
    for number, layer in enumerate(layers):
        places = layer(x_TH, step)
        while True:
            step.clock.at(micro_batch, number)
            try:
                place = next(places)
            except StopIteration as done:
                x_TH = done.value
                break
            if place in order.cuts:
                yield
        if "layer" in order.cuts and number + 1 < len(layers):
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
