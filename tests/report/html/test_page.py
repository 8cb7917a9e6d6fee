"""The page shows what RUN.json says, all of it and nothing else; it needs nothing from outside."""

import json
import re
from dataclasses import dataclass

import msgspec
import pytest

from moe_runtime.launch.published import references_for
from moe_runtime.report.html.page import render_page
from moe_runtime.report.reference import Reference
from moe_runtime.report.schema import Report
from moe_runtime.spec.catalog import CATALOG
from tests.report.html.page_reader import Node, look_up, read

PRICE = 25.0
REFERENCES = (
    Reference(
        id="one",
        model="a-model",
        role="decode",
        value=1234.0,
        gpus=8,
        machine="h0",
        conditions="EP 72, 32 redundant experts",
        read="off a chart",
        source="A report of 2025",
    ),
)
# What may hold a digit without being a figure: words, and the marks of axes and legends.
WORDS = re.compile(r"\bp(?:5|50|90|99)\b")
MARKED = {
    "data-path", "data-ref", "data-change", "data-cost", "data-price", "data-name", "data-reason",
    "data-rank", "data-json",
}  # fmt: skip


@dataclass
class Page:
    """A page as text and as a tree, and the reports on it, also as RUN.json has them."""

    reports: list[Report]
    text: str

    def __post_init__(self) -> None:
        self.html = read(self.text)
        self.data = [json.loads(msgspec.json.encode(r)) for r in self.reports]

    def marked(self, attribute: str) -> dict[str, str]:
        """Texts of the elements with an attribute, by its value."""
        found = [
            (n.attributes[attribute] or "", n.text()) for n in self.html.all() if attribute in n.attributes
        ]
        return dict(found)


@pytest.fixture(scope="session")
def pages(measured, simulated, bare) -> dict[str, Page]:
    faster = msgspec.structs.replace(
        measured, goodput=msgspec.structs.replace(measured.goodput, requests_per_second=0.3)
    )
    cases = {
        "one": [("run.json", measured)],
        "simulated": [("sim.json", simulated)],
        "two": [("a.json", measured), ("b.json", faster)],
        "bare": [("bare.json", bare), ("sim.json", simulated)],
    }
    return {
        name: Page([r for _, r in reports], render_page(reports, REFERENCES, PRICE))
        for name, reports in cases.items()
    }


PAGES = pytest.mark.parametrize("name", ["one", "simulated", "two", "bare"])


def figure_of(text: str) -> tuple[float, float]:
    """(the number at the end of a text, half a unit of its last place); per cent are parts of 100."""
    found = re.search(r"(-?[\d,]+)(\.\d+)?( %)?$", text.strip())
    assert found, text
    whole, decimals, per_cent = found.groups()
    half = 0.5 * 10.0 ** -(len(decimals) - 1 if decimals else 0)
    value = float(whole.replace(",", "") + (decimals or ""))
    return (value / 100, half / 100) if per_cent else (value, half)


@PAGES
def test_every_figure_is_the_one_of_the_report(pages, name):
    page, seen = pages[name], 0
    for node in page.html.all():
        path = node.attributes.get("data-path")
        if path is None:
            continue
        seen += 1
        value, text = look_up(page.data[int(node.attributes["data-run"] or "")], path), node.text()
        if value is None:
            assert text.endswith("n/a"), path
        elif isinstance(value, str):
            assert text == value, path
        else:
            shown, half = figure_of(text)
            scale = 1e3 if path.endswith("seconds_per_step") else 1.0
            # Rounded twice: to three digits, then to decimals.
            assert shown == pytest.approx(scale * value, abs=1.2 * half), (path, text)
    assert seen > 500


@PAGES
def test_no_figure_comes_from_elsewhere(pages, name):
    """A digit on the page stands in a marked element, or on an axis."""
    (body,) = pages[name].html.find("body")
    for node in body.all():
        text = WORDS.sub("", "".join(c for c in node.children if isinstance(c, str)))
        if re.search(r"\d", text):
            assert any(
                MARKED & n.attributes.keys() or {"tick", "steps"} & set(n.classes()) for n in node.up()
            ), f"{node.tag}: {text}"


@PAGES
def test_what_must_be_there_is_there(pages, name):
    page = pages[name]
    shown = {(n.attributes.get("data-run"), n.attributes.get("data-path")) for n in page.html.all()}
    for run, report in enumerate(page.reports):
        wanted = [
            f"latency.{k}_ms.{p}" for k in ("ttft", "tpot", "itl", "end_to_end") for p in ("mean", "p99")
        ]
        wanted += ["system.throughput.output.per_node_of_all", "goodput.fraction", "window.note", "commit"]
        for d in report.deployments:
            at = f"deployments.{d.name}"
            for kind in ("output", "new_prefill", "cached_prefill"):
                wanted += [
                    f"{at}.throughput.{kind}.{over}" for over in ("total", "per_rank", "per_node_of_role")
                ]
            wanted += [
                f"{at}.phases.{i}.{f}" for i in range(len(d.phases)) for f in ("share", "seconds_per_step")
            ]
            wanted += [f"{at}.balancedness.{i}.mean" for i in range(len(d.balancedness))]
            if d.timeline is None or d.rank_loads is None:
                continue
            wanted += [
                f"{at}.timeline.{c}.{i}" for c in ("queue", "kv_fraction", "balancedness") for i in (0, 9)
            ]
            if d.balancing is not None:
                wanted += [
                    f"{at}.balancing.rebalances.{i}.{f}"
                    for i, r in enumerate(d.balancing.rebalances)
                    for f in msgspec.structs.asdict(r)
                ]
            if d.attribution is not None:
                wanted += [f"{at}.attribution.total.{c}.0.seconds" for c in ("parts", "bounds")]
                wanted += [f"{at}.attribution.total.roofline"]
            for part in ("before", "after"):
                rows = getattr(d.rank_loads, part)
                wanted += [f"{at}.rank_loads.{part}.{i}.{row.index(max(row))}" for i, row in enumerate(rows)]
        assert {(str(run), path) for path in wanted} <= shown


def test_of_many_ranks_the_highest_and_the_lowest_are_shown(pages):
    page = pages["simulated"]
    cells = [n for n in page.html.find("td") if "data-rank" in n.attributes]
    assert cells
    for i, cell in enumerate(cells):
        assert cell.parent is not None
        before = cell.parent.children[cell.parent.children.index(cell) - 1]
        assert isinstance(before, Node)
        row, _, rank = (before.attributes["data-path"] or "").rpartition(".")
        loads = look_up(page.data[0], row)
        assert cell.text() == rank
        assert loads[int(rank)] == (max(loads) if i % 2 == 0 else min(loads))


def test_costs_are_price_over_tokens_of_an_hour(pages):
    (report,), found = pages["one"].reports, pages["one"].marked("data-cost")
    assert set(found) == {"all.new_prefill", "all.output", "prefill.new_prefill", "decode.output"}
    for key, text in found.items():
        who, kind = key.split(".")
        section = report.system if who == "all" else next(d for d in report.deployments if d.name == who)
        rate = getattr(section.throughput, kind)
        per_node = rate.per_node_of_all if who == "all" else rate.per_node_of_role
        shown, half = figure_of(text)
        assert shown == pytest.approx(PRICE / (per_node * 3600) * 1e6, abs=1.2 * half)
    assert [float(price) for price in pages["one"].marked("data-price").values()] == [PRICE]


def test_changes_are_against_the_first_run(pages):
    first = pages["two"].reports[0].goodput.requests_per_second
    # What is equal in both has no change.
    expected = {"goodput.requests_per_second": f"{100 * (0.3 / first - 1):+.1f} %"}
    assert pages["two"].marked("data-change") == expected


def test_published_figures_are_shown_with_their_conditions(pages):
    assert pages["one"].marked("data-ref") == {
        "model": "a-model",
        "one.per_gpu": "154",
        "one.value": "1,234",
        "one.gpus": "8",
        "one.machine": "h0",
        "one.conditions": "EP 72, 32 redundant experts",
        "one.read": "off a chart",
        "one.source": "A report of 2025",
    }


@PAGES
def test_nothing_is_loaded_and_nothing_runs(pages, name):
    html = pages[name].html
    forbidden = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "use", "image"}
    assert not {n.tag for n in html.all()} & forbidden
    for node in html.all():
        for key, value in node.attributes.items():
            assert not key.startswith("on"), key
            assert key != "src"
            assert key != "style"
            assert key != "href" or (value or "").startswith("#")
            assert key == "content" or "://" not in (value or "")
    (style,) = html.find("style")
    assert not re.search(r"url\(|@import|://|expression", style.text())
    policy = next(n for n in html.find("meta") if n.attributes.get("http-equiv") == "Content-Security-Policy")
    assert (policy.attributes["content"] or "").startswith("default-src 'none';")
    assert pages[name].text.startswith("<!doctype html>\n")
    links = {n.attributes["href"] for n in html.find("a")}
    assert links == {f"#{n.attributes['id']}" for n in html.find("h2")}


@PAGES
def test_every_chart_has_a_description_and_a_table_near_it(pages, name):
    html = pages[name].html
    charts = [n for n in html.find("svg") if "chart" in n.classes()]
    assert charts
    for chart in charts:
        assert chart.attributes["role"] == "img"
        title = chart.children[0]
        assert isinstance(title, Node)
        assert title.tag == "title"
        assert title.text()
        section = next(n for n in chart.up() if n.tag == "section")
        assert section.find("table")
    assert {n.attributes["id"] for n in html.find("input")} == {"theme-auto", "theme-light", "theme-dark"}


HOSTILE = '"><script>alert(1)</script><b title=\'x\' onmouseover="y">&amp;\u202e\x07'


def with_names(report: Report, suffix: str) -> Report:
    """`suffix` after every text of a report that a plan, a model or a machine could name."""

    def spoil(value):
        if isinstance(value, dict):
            return {k: spoil(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [spoil(v) for v in value]
        return f"{value}{suffix}" if isinstance(value, str) else value

    fields = msgspec.to_builtins(report)
    kept = {name: fields[name] for name in ("kind", "missing", "window", "request_log")}
    spoiled = {**spoil(fields), **kept, "plan": {suffix: [suffix, {"a": suffix}]}}
    for d in spoiled["deployments"]:
        d["dispatch_modes"] = {suffix: 20}
    return msgspec.convert(spoiled, type=Report)


def test_no_name_becomes_markup(measured):
    """A page with hostile names everywhere is the page with harmless ones, but for their text."""
    hostile, harmless = (
        read(render_page([(f"run{s}", with_names(measured, s))], REFERENCES, PRICE)) for s in (HOSTILE, "x")
    )
    shape = [(n.tag, list(n.attributes)) for n in hostile.all()]
    assert shape == [(n.tag, list(n.attributes)) for n in harmless.all()]
    assert "\u202e" not in hostile.text()
    assert "\x07" not in hostile.text()
    assert any("<script>alert(1)</script>" in n.text() for n in hostile.find("h1"))


def test_published_rows_belong_to_models_of_the_catalogue(measured):
    """A small model of the same family has none; the rows say what the file says."""
    assert references_for([measured.model]) == ()
    spec = CATALOG["deepseek-v3"]
    model = msgspec.structs.replace(
        measured.model,
        family=spec.family,
        hidden=spec.hidden,
        num_layers=spec.num_layers,
        num_moe_layers=spec.num_moe_layers,
        num_experts=spec.moe.num_experts,
        top_k=spec.moe.router.top_k,
    )
    rows = {r.id: r for r in references_for([model, model])}
    assert len(rows) == len(references_for([model]))
    row = rows["lm_d_4k_100_mtp"]
    assert (row.value, row.gpus, row.machine, row.role) == (17373.0, 8, "h100-sxm", "decode")
    assert row.conditions == (
        "EP 72, 32 redundant experts, 128 sequences per GPU, mean context 4,050, two micro-batches,"
        " multi-token prediction (2 rows, 1.6 accepted), balancer on"
    )
    assert "cache hits" in rows["ds6_prefill"].read
    assert rows["lm_gb200_1"].gpus == 1
    assert rows["lm_p_tp16_1k"].conditions.startswith("TP 16, 16,384 tokens per step of all GPUs")
