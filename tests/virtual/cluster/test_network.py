"""Copies that share links, against what they must take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.virtual.cluster.network import Copy, Network, RankName
from moe_runtime.virtual.cluster.requests import Requests, VirtualRequest, make_virtual_sequence


def sequence(index: int) -> Sequence:
    virtual = VirtualRequest(index=index, at=0.0, input_length=1, output_length=2)
    return make_virtual_sequence(Requests().request(virtual), transferred=True)


def number_of(copy: Copy) -> int:
    return copy.sequence.request.id


def ends(starts: list[tuple[float, int, int, float]]) -> list[tuple[float, int]]:
    """(end, number) of copies of (start, source, target, seconds alone), in order of their ends."""
    network, out = Network(), []
    for number, (start, source, target, seconds) in enumerate(sorted(starts)):
        while (end := network.next_end()) is not None and end <= start:
            copy = network.pop_ended(end)
            assert copy is not None
            out.append((end, number_of(copy)))
        network.start(("p", source), ("d", target), sequence(number), seconds, start)
    while (end := network.next_end()) is not None:
        copy = network.pop_ended(end)
        assert copy is not None
        out.append((end, number_of(copy)))
    return out


def test_copies_on_different_links_do_not_know_of_each_other():
    assert ends([(0.0, 0, 0, 3.0), (1.0, 1, 1, 1.0)]) == [(2.0, 1), (3.0, 0)]


def test_copies_share_the_busier_of_their_links():
    # Two out of rank 0: each at half speed until the first ends; then the other at its own.
    assert ends([(0.0, 0, 0, 1.0), (0.0, 0, 1, 2.0)]) == [(2.0, 0), (3.0, 1)]
    # The second comes when the first has half of its way.
    assert ends([(0.0, 0, 0, 2.0), (1.0, 1, 0, 2.0)]) == [(3.0, 0), (4.0, 1)]


COPY = st.tuples(st.floats(0, 10), st.integers(0, 2), st.integers(0, 2), st.floats(0.01, 5))


@given(st.lists(COPY, min_size=1, max_size=12))
def test_no_copy_is_faster_than_alone(starts):
    done = ends(starts)
    assert sorted(number for _, number in done) == list(range(len(starts)))
    assert [end for end, _ in done] == sorted(end for end, _ in done)
    for end, number in done:
        start, _, _, seconds = sorted(starts)[number]
        assert end >= start + seconds - 1e-9


@given(st.lists(COPY, min_size=1, max_size=12))
def test_no_link_carries_more_than_it_can(starts):
    starts = sorted((0.0, *rest) for _, *rest in starts)
    done = ends(starts)
    for side in (1, 2):
        for rank in range(3):
            mine = [(end, starts[number][3]) for end, number in done if starts[number][side] == rank]
            carried = sum(seconds for _, seconds in mine)
            assert max((end for end, _ in mine), default=0.0) >= carried - 1e-9


def test_copies_of_an_instance_that_is_gone_end_and_leave_the_links_to_others():
    network = Network()
    here: RankName = ("d", 0)
    network.start(("gone", 0), here, sequence(0), 1.0, 0.0)
    network.start(("p", 0), here, sequence(1), 1.0, 0.0)
    assert [number_of(copy) for copy in network.break_source("gone", 1.0)] == [0]
    assert network.next_end() == pytest.approx(1.5)
    assert [number_of(copy) for copy in network.break_target("d", 1.2)] == [1]
    assert network.next_end() is None
