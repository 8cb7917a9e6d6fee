"""Two micro-batches on lanes: never faster than the busiest lane, never slower for shorter stages, and what
every rank by itself would take."""

import math
from collections.abc import Generator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.engine import overlap
from moe_runtime.models.context import NoClock, StepContext
from moe_runtime.models.layer import Cut
from moe_runtime.virtual.cost.lanes import (
    DECODE,
    EXPERTS,
    FINISH,
    FIRST,
    PREFILL,
    SECOND,
    SHARED,
    Layer,
    Stages,
    Transfer,
    collective,
    plain,
    two_way,
)
from tests.virtual.every_rank import Loads, decode_layer, heaviest, prefill_layer, slowed_layer

seconds = st.floats(0, 1e-2)
transfers = st.builds(Transfer, seconds, seconds)
stages = st.builds(
    Stages,
    first=seconds,
    second=seconds,
    shared=seconds,
    experts=seconds,
    finish=seconds,
    dispatch=transfers,
    combine=transfers,
    heaviest=seconds,
).map(lambda s: s._replace(heaviest=s.experts + s.heaviest))
both = st.sampled_from(["two_way", "collective"])
NEARLY = 1e-9


def overlapped(kind: str, s: Stages, slowed: float = 1.5) -> Layer:
    """Half of the shorter transfer is the fixed time of those that all take part in."""
    if kind == "two_way":
        return two_way(s)
    return collective(s, min(s.dispatch.seconds, s.combine.seconds) / 2, slowed)


def issued(order: overlap.Order) -> list[tuple[int, int]]:
    """(micro-batch, stage) of all layers but the ends, as the engine issues them."""
    log: list[tuple[int, int]] = []

    def layer(x_TH: torch.Tensor, step: StepContext) -> Generator[Cut, None, torch.Tensor]:
        batch = int(x_TH[0, 0])
        for stage, cut in (
            (FIRST, "attention"),
            (SECOND, "dispatch"),
            (SHARED, "shared"),
            (EXPERTS, "combine"),
        ):
            if stage != SHARED or step.shared_beside == "dispatch":
                log.append((batch, stage))
            yield cut  # type: ignore[misc]
        log.extend((batch, s) for s in ((SHARED,) if step.shared_beside == "combine" else ()) + (FINISH,))
        return x_TH

    batches = [(torch.full((1, 1), float(b)), SimpleNamespace(clock=NoClock())) for b in range(2)]
    overlap.run(batches, [layer] * 8, order=order)  # type: ignore[arg-type]
    return log[20:-20]


@pytest.mark.parametrize(("engine", "model"), [(overlap.PREFILL, PREFILL), (overlap.DECODE, DECODE)])
def test_stages_are_issued_as_the_engine_issues_them(engine, model):
    found = issued(engine)
    begin = found.index(model[0])
    assert found[begin : begin + 2 * len(model)] == [*model, *model]


def compute(s: Stages) -> float:
    return sum(s.compute)


@given(stages, both)
def test_overlap_is_between_the_busiest_lane_and_no_overlap(s, kind):
    layer = overlapped(kind, s)
    links = s.dispatch.seconds + s.combine.seconds
    if kind == "two_way":
        links = max(map(sum, zip(s.dispatch, s.combine, strict=True)))
    assert 2 * max(compute(s), links) - NEARLY <= layer.seconds <= 2 * plain(s).seconds + NEARLY


@given(stages, both)
def test_seconds_are_compute_and_what_is_exposed_of_busy_links(s, kind):
    layer = overlapped(kind, s)
    exposed = layer.exposed_dispatch + layer.exposed_combine
    assert 2 * compute(s) - NEARLY <= layer.seconds - exposed
    assert layer.seconds - exposed <= 2 * (compute(s) + s.heaviest - s.experts) + NEARLY
    assert exposed - NEARLY <= layer.busy <= layer.seconds + NEARLY


@given(stages, both, st.sampled_from(Stages._fields), st.floats(0, 1e-2), st.sampled_from([(1, 0), (0, 1)]))
def test_a_longer_stage_never_ends_a_layer_sooner(s, kind, name, more, way):
    now = getattr(s, name)
    if name in ("dispatch", "combine"):
        longer = s._replace(**{name: Transfer(*(v + more * w for v, w in zip(now, way, strict=True)))})
    elif name == "experts":  # of all ranks, the heaviest too
        longer = s._replace(experts=s.experts + more, heaviest=s.heaviest + more)
    else:
        longer = s._replace(**{name: now + more})
    start = min(s.dispatch.seconds, s.combine.seconds) / 2
    before, after = (two_way(x) if kind == "two_way" else collective(x, start, 1.5) for x in (s, longer))
    assert after.seconds >= before.seconds - NEARLY
    assert plain(longer).seconds >= plain(s).seconds


@given(stages, st.floats(1, 3), st.floats(1, 3))
def test_transfers_that_compute_slows_more_never_end_sooner(s, one, other):
    low, high = sorted((one, other))
    assert overlapped("collective", s, high).seconds >= overlapped("collective", s, low).seconds - NEARLY


def test_transfers_no_longer_than_what_runs_beside_them_are_hidden():
    out, back = Transfer(1.5, 2.0), Transfer(2.5, 1.0)
    s = Stages(
        first=2.0, second=3.0, shared=1.0, experts=3.0, finish=1.0, heaviest=3.0, dispatch=out, combine=back
    )  # fmt: skip
    assert two_way(s).seconds == 2 * compute(s)
    assert collective(s, 1.0, 1.2).seconds == pytest.approx(2 * compute(s))
    assert collective(s, 1.0, 2.5).seconds > 2 * compute(s) + 0.1


def test_links_carry_both_directions_at_once():
    """Who receives most is not who sends most: both at once, not one after the other."""
    out, back = Transfer(1.0, 4.0), Transfer(4.0, 1.0)
    s = Stages(
        first=0.1, second=0.1, shared=0.1, experts=0.1, finish=0.1, heaviest=0.1, dispatch=out, combine=back
    )  # fmt: skip
    assert 10 <= two_way(s).seconds < 11 < 16 <= collective(s, 0.0, 1.0).seconds


def test_every_stage_of_both_micro_batches_is_issued_once():
    for order in (DECODE, PREFILL):
        assert sorted(order) == [(batch, stage) for batch in (0, 1) for stage in range(5)]


@pytest.mark.parametrize("hottest", [1.1, 1.3, 3.0])
@pytest.mark.parametrize("length", [0.25, 0.5, 1.0, 2.0])
def test_layers_of_which_each_has_another_hottest_rank_take_what_every_rank_by_itself_would(hottest, length):
    """58 layers, 32 ranks, transfers from a quarter of a deployment's to twice."""
    mean = Stages(
        first=1.5, second=2.5, shared=0.5, experts=3.5, finish=0.1, heaviest=3.5,
        dispatch=Transfer(2.5 * length, 2.5 * length), combine=Transfer(5.0 * length, 5.0 * length),
    )  # fmt: skip
    loads = Loads.draw(layers=58, ranks=32, hottest=hottest, seed=1)
    heats = loads.most.mean(axis=0)
    for exact, lanes in ((prefill_layer, lambda s: collective(s, 0.0, 1.0)), (decode_layer, two_way)):
        modelled = math.fsum(lanes(heaviest(mean, heat)).seconds for heat in heats) / len(heats)
        assert exact(mean, loads) == pytest.approx(modelled, rel=0.025)


def test_a_hottest_rank_is_made_up_for_only_where_transfers_are_short():
    """Against waiting for the heaviest rank at every stage: 5 % and more if computation is nearly all there
    is, nothing if transfers take as long."""
    saved = []
    for length in (0.25, 1.0):
        own = Stages(
            first=1.5, second=2.5, shared=0.5, experts=3.5, finish=0.1, heaviest=4.5,
            dispatch=Transfer(2.5 * length, 2.5 * length), combine=Transfer(5.0 * length, 5.0 * length),
        )  # fmt: skip
        every = collective(own._replace(experts=own.heaviest), 0.0, 1.0)
        saved.append(1 - collective(own, 0.0, 1.0).seconds / every.seconds)
    assert saved[0] > 0.05
    assert saved[1] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("length", [0.5, 1.0, 2.0])
def test_bytes_are_slow_while_there_is_computation_beside_them(length):
    out, back = Transfer(2.6 * length, 2.6 * length), Transfer(5.0 * length, 5.0 * length)
    s = Stages(
        first=1.5, second=2.5, shared=0.5, experts=3.5, finish=0.1, heaviest=3.5, dispatch=out, combine=back
    )  # fmt: skip
    exact = slowed_layer(s, 0.5, 1.6, layers=6, tick=0.01)
    assert collective(s, 0.5, 1.6).seconds == pytest.approx(exact, rel=0.01)
