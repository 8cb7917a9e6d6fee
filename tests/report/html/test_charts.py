"""Charts by hand: where bars end, which band a cell is in, how a curve runs."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.report.html import heat
from moe_runtime.report.html.axes import LEFT, RIGHT, WIDE
from moe_runtime.report.html.bars import bar_chart, stacked_bar
from moe_runtime.report.html.lines import Curve, Track, distribution_chart, track_chart
from moe_runtime.report.html.markup import el, join
from moe_runtime.report.html.scale import Scale, round_up, tick_label, ticks
from tests.report.html.page_reader import Node, read


def drawn(svg: str) -> Node:
    return read(f"<html>{svg}</html>")


def of_class(svg: str, name: str) -> list[Node]:
    return [n for n in drawn(svg).all() if name in n.classes()]


def number_of(node: Node, attribute: str) -> float:
    return float(node.attributes[attribute] or "")


@given(st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_round_few_and_reach_the_end(high, most):
    end = round_up(high, most)
    found = ticks(0.0, end, most)
    assert end >= high * (1 - 1e-9)
    assert found[0] == 0
    assert found[-1] == pytest.approx(end)
    assert 2 <= len(found) <= most + 1
    step = found[1]
    assert f"{step:.0e}"[0] in "125"
    assert float(f"{step:.0e}") == pytest.approx(step), "one digit"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.25, "0.25"), (950.0, "950"), (1500.0, "1.5k"), (2e6, "2M"), (3e9, "3G")],
)
def test_ticks_are_short(value, shown):
    assert tick_label(value) == shown


def test_axes_end_where_there_is_nothing():
    assert round_up(0.0) == 1.0
    assert round_up(float("nan")) == 1.0
    assert Scale(0.0, 10.0, 100.0, 0.0)(2.5) == 75.0
    assert Scale(0.0, 10.0, 0.0, 100.0)(25.0) == 100.0, "held inside"


def test_bars_are_as_long_as_their_values():
    svg = bar_chart("d", [("s0", "a", 8.0, "8", {}), ("s1", "b", 2.0, "2", {}), ("s2", "c", None, "n/a", {})])
    widths = [number_of(n, "width") for n in of_class(svg, "bar")]
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.01)
    assert widths[2] == 1.0, "a line where there is no value"
    assert widths[0] < WIDE


def test_parts_fill_the_bar():
    svg = stacked_bar("d", [("s0", 0.25, "a", {}), ("s1", 0.5, "b", {}), ("s2", 0.25, "c", {})])
    pieces = of_class(svg, "bar")
    assert [number_of(n, "x") for n in pieces] == [0, 0.25 * WIDE, 0.75 * WIDE]
    assert number_of(pieces[-1], "x") + number_of(pieces[-1], "width") + 1 == pytest.approx(WIDE)


def test_a_track_breaks_where_nothing_ran():
    track = Track(
        description="d",
        seconds=2.0,
        values=[1.0, 3.0, None, 4.0],
        titles=["a"] * 4,
        marks=[{}] * 4,
        shaded=(2.0, 4.0),
    )
    lines = of_class(track_chart(track), "line")
    assert len(lines) == 2
    plot = WIDE - LEFT - RIGHT
    xs = [float(x) for x in re.findall(r"[MH]([\d.]+)", lines[0].attributes["d"] or "")]
    assert xs == pytest.approx([LEFT, LEFT + plot / 4, LEFT + plot / 2], abs=0.06)
    start, *ys = (float(y) for y in re.findall(r"(?: |V)([\d.]+)", lines[0].attributes["d"] or ""))
    assert start == ys[0] > ys[1], "up is more"
    xs = [float(x) for x in re.findall(r"[MH]([\d.]+)", lines[1].attributes["d"] or "")]
    assert xs == pytest.approx([LEFT + 3 * plot / 4, LEFT + plot], abs=0.06)
    (band,) = of_class(track_chart(track), "band")
    assert number_of(band, "x") == pytest.approx(LEFT + plot / 4, abs=0.06)
    assert number_of(band, "width") == pytest.approx(plot / 4, abs=0.06)
    assert len(of_class(track_chart(track), "hover")) == 4


@pytest.mark.parametrize("count", [4, 1000])
def test_a_distribution_ends_at_one(count):
    values = [10.0 * (i + 1) / count for i in range(count)]
    curve = Curve(color="s0", values=values, marked=[(0.5, 5.0, "p50: 5", {"data_path": "p"})])
    svg = distribution_chart("d", [curve], unit="ms", limit=20.0)
    (line,) = of_class(svg, "line")
    places = [
        tuple(map(float, p.split())) for p in re.findall(r"[ML]([\d.]+ [\d.]+)", line.attributes["d"] or "")
    ]
    assert len(places) <= 401
    assert places[0][1] - places[-1][1] == pytest.approx(120, abs=0.11)
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in zip(places, places[1:], strict=False))
    (spot,) = of_class(svg, "spot")
    middle = min(places, key=lambda p: abs(p[1] - number_of(spot, "cy")))
    assert middle[0] == pytest.approx(number_of(spot, "cx"), abs=8)
    (limit,) = of_class(svg, "limit")
    assert number_of(limit, "x1") > places[-1][0]


@pytest.mark.parametrize(
    ("load", "band"), [(0.0, 0), (0.5, 1), (0.94, 3), (1.0, 4), (1.06, 5), (1.99, 8), (2.0, 9)]
)
def test_bands(load, band):
    assert heat.band(load) == band


CELLS = re.compile(r"M([\d.]+) [\d.]+h([\d.]+)v")


def test_every_cell_of_a_map_has_its_colour():
    rows = [[0.1, 1.0, 1.0], [1.0, 3.0, 0.6]]
    svg = heat.heat_map("d", [3, 4], rows, ("deployments", "decode", "rank_loads", "after"), 1)
    wide = (WIDE - LEFT - RIGHT) / 3
    found = {
        color: [(round((float(x) - LEFT) / wide), round(float(w) / wide)) for x, w in re.findall(CELLS, path)]
        for n in drawn(svg).find("path")
        for color, path in ((n.classes()[0], n.attributes["d"] or ""),)
    }
    assert found == {"h0": [(0, 1)], "h4": [(1, 2), (0, 1)], "h9": [(1, 1)], "h1": [(2, 1)]}, (
        "(first rank, ranks)"
    )
    hovers = {n.attributes["data-path"]: n.text() for n in of_class(svg, "hover")}
    assert hovers["deployments.decode.rank_loads.after.1.2"] == "layer 4, rank 2: 0.600"
    assert [n.text() for n in of_class(svg, "on")] == ["0.10", "1.00", "1.00", "1.00", "3.00", "0.60"]


def test_a_large_map_stays_small_and_names_each_layers_highest():
    rows = [[1.0 + 0.001 * rank for rank in range(144)] for _ in range(58)]
    svg = heat.heat_map("d", list(range(58)), rows, ("p",), 0)
    assert len(svg) < 300_000
    hovers = of_class(svg, "hover")
    assert len(hovers) == 58
    assert hovers[7].text() == "layer 7, highest at rank 143: 1.143"


def test_markup_escapes_what_is_not_markup():
    assert el("b", "<i>", el("i", "&"), data_x='"', hidden=True, open=False) == (
        '<b data-x="&quot;" hidden>&lt;i&gt;<i>&amp;</i></b>'
    )
    assert join(["a\u202eb\x00", None]) == "a\ufffdb\ufffd"
