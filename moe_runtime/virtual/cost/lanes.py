"""Lanes: a layer's stages on one lane that computes and one that transfers, for one or two micro-batches.

Owns the order in which stages are issued. Each lane takes its tasks in that order, so a step's end is a
max-plus expression of the durations: longer stages never end it sooner. Knows no kernel and no link.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

FIRST, SECOND, SHARED, EXPERTS, FINISH = range(5)
WARM = 2  # layers after which the pattern repeats

Order = Sequence[tuple[Literal[0, 1], int]]  # (micro-batch, stage) of one layer, in order of issue

# Decode: the second micro-batch two stages behind, as the engine has it. Rows of one travel beside the shared
# experts and the other's projections, results beside the other's attention core.
DECODE: Order = (
    (0, FIRST), (1, EXPERTS), (0, SECOND), (1, FINISH), (0, SHARED),
    (1, FIRST), (0, EXPERTS), (1, SECOND), (0, FINISH), (1, SHARED),
)  # fmt: skip
# Prefill: one after the other; shared experts and the next layer's attention beside the combine.
PREFILL: Order = (
    (0, SHARED), (0, FINISH), (0, FIRST), (0, SECOND),
    (1, SHARED), (1, FINISH), (1, FIRST), (1, SECOND),
    (0, EXPERTS), (1, EXPERTS),
)  # fmt: skip


class Stages(NamedTuple):
    """Seconds of one micro-batch's layer. A dispatch leaves after `second`, a combine after `experts`.

    first     norm, projections up to the attention core
    second    core, output projection, norm, router, choice of slots
    shared    shared experts
    experts   routed experts
    finish    sum and residual
    """

    first: float
    second: float
    shared: float
    experts: float
    finish: float
    dispatch: float
    combine: float


class Layer(NamedTuple):
    """One layer: seconds, and those in which computation waits for a dispatch, for a combine."""

    seconds: float
    exposed_dispatch: float
    exposed_combine: float


def plain(stages: Stages) -> Layer:
    """One micro-batch, one stage after the other, transfers in full."""
    return Layer(sum(stages), stages.dispatch, stages.combine)


def overlapped(stages: Stages, order: Order) -> Layer:
    """Two micro-batches of equal stages; the mean of layers once the pattern repeats."""
    durations = [(batch, stage, stages[stage]) for batch, stage in order]
    out, back = stages.dispatch, stages.combine
    compute = transfer = dispatch = combine = 0.0
    arrived = [0.0, 0.0]
    mark = (0.0, 0.0, 0.0)
    for layer in range(2 * WARM):
        if layer == WARM:
            mark = (compute, dispatch, combine)
        for batch, stage, seconds in durations:
            if stage >= EXPERTS and arrived[batch] > compute:
                if stage == EXPERTS:
                    dispatch += arrived[batch] - compute
                else:
                    combine += arrived[batch] - compute
                compute = arrived[batch]
            compute += seconds
            if stage in (SECOND, EXPERTS):
                if compute > transfer:
                    transfer = compute
                transfer += out if stage == SECOND else back
                arrived[batch] = transfer
    return Layer(
        (compute - mark[0]) / WARM,
        (dispatch - mark[1]) / WARM,
        (combine - mark[2]) / WARM,
    )
