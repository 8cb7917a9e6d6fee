"""Two micro-batches on two lanes: never faster than either lane, never slower for shorter stages."""

from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.virtual.cost.lanes import DECODE, PREFILL, Stages, overlapped, plain

seconds = st.floats(0, 1e-2)
stages = st.builds(
    Stages,
    first=seconds,
    second=seconds,
    shared=seconds,
    experts=seconds,
    finish=seconds,
    dispatch=seconds,
    combine=seconds,
)
orders = st.sampled_from([DECODE, PREFILL])
NEARLY = 1e-9


def compute(s: Stages) -> float:
    return s.first + s.second + s.shared + s.experts + s.finish


@given(stages, orders)
def test_overlap_is_between_the_busier_lane_and_no_overlap(s, order):
    layer = overlapped(s, order)
    floor = 2 * max(compute(s), s.dispatch + s.combine)
    assert floor - NEARLY <= layer.seconds <= 2 * plain(s).seconds + NEARLY


@given(stages, orders)
def test_seconds_are_compute_and_what_is_exposed(s, order):
    layer = overlapped(s, order)
    total = 2 * compute(s) + layer.exposed_dispatch + layer.exposed_combine
    assert abs(layer.seconds - total) < NEARLY


@given(stages, orders, st.sampled_from(Stages._fields), st.floats(0, 1e-2))
def test_a_longer_stage_never_ends_a_layer_sooner(s, order, name, more):
    longer = s._replace(**{name: getattr(s, name) + more})
    assert overlapped(longer, order).seconds >= overlapped(s, order).seconds - NEARLY
    assert plain(longer).seconds >= plain(s).seconds


def test_transfers_no_longer_than_what_runs_beside_them_are_hidden():
    s = Stages(first=2.0, second=3.0, shared=1.0, experts=3.0, finish=1.0, dispatch=2.0, combine=2.5)
    for order in (DECODE, PREFILL):
        assert overlapped(s, order).seconds == 2 * compute(s)


def test_every_stage_of_both_micro_batches_is_issued_once():
    for order in (DECODE, PREFILL):
        assert sorted(order) == [(batch, stage) for batch in (0, 1) for stage in range(5)]
