"""The headline: throughput per node by role, what is counted and what it is divided by; what tokens cost."""

from collections.abc import Sequence

from moe_runtime.report.cost import costs, kinds_of
from moe_runtime.report.html.figures import Key, Run, count
from moe_runtime.report.html.markup import Html, Marks, el, join
from moe_runtime.report.html.parts import run_heading, section
from moe_runtime.report.html.tables import cell, fold, name, table
from moe_runtime.report.schema import Deployment
from moe_runtime.report.show import number

KIND_NAMES: dict[str, str] = {
    "new_prefill": "new prefill",
    "cached_prefill": "cached prefill",
    "output": "output",
}
_COUNTED = {
    "new_prefill": "prompt tokens/s computed for the first time",
    "output": "generated tokens/s that reached clients",
}
_DENOMINATORS = ("total", "per_rank", "per_node_of_role", "per_node_of_all")


def throughput(runs: Sequence[Run]) -> Html:
    parts: list[Html] = []
    for run in runs:
        parts += [run_heading(run, runs), el("div", *_cards(run), class_="cards"), _rates(run)]
    text = el(
        "p",
        "Rates are over the window of a run. Output tokens count when they reach the client, new prefill"
        " tokens when a rank has computed them; prompt tokens found in a cache and tokens computed again are"
        " neither, and input and output are never added up. Compare a role with published figures of the"
        " same role.",
        class_="dim small",
    )
    return section("throughput", "Throughput per node", join(parts), text)


def _cards(run: Run) -> list[Html]:
    cards = [_card(run, d, kind) for d in run.report.deployments for kind in kinds_of(d.name)]
    if len(run.report.deployments) > 1:
        cards.append(_whole(run))
    return cards


def _card(run: Run, d: Deployment, kind: str) -> Html:
    at: tuple[Key, ...] = ("deployments", d.name)
    rate = (*at, "throughput", kind)
    return el(
        "div",
        el("h4", run.word(*at, "name"), f": {KIND_NAMES[kind]}"),
        run.figure(*rate, "per_node_of_role", tag="div", class_="big"),
        el("div", "tokens/s per node of ", run.word(*at, "name"), class_="unit"),
        _definition(
            join([run.figure(*rate, "total"), f" {_COUNTED[kind]}, over ", _window(run)]),
            join(
                [
                    "nodes of this role: ",
                    run.figure(*at, "nodes", form=count),
                    " (",
                    run.figure(*at, "ranks", form=count),
                    " ranks, EP ",
                    run.figure(*at, "expert_parallel", form=count),
                    ")",
                ]
            ),
        ),
        class_="card",
    )


def _whole(run: Run) -> Html:
    rate = ("system", "throughput", "output")
    return el(
        "div",
        el("h4", "all deployments: output"),
        run.figure(*rate, "per_node_of_all", tag="div", class_="big"),
        el("div", "tokens/s per node of all", class_="unit"),
        _definition(
            join([run.figure(*rate, "total"), f" {_COUNTED['output']}, over ", _window(run)]),
            join(
                [
                    "nodes of all roles: ",
                    run.figure("system", "nodes", form=count),
                    " (",
                    run.figure("system", "ranks", form=count),
                    " ranks), all that is paid for",
                ]
            ),
        ),
        class_="card",
    )


def _definition(counted: Html, divided: Html) -> Html:
    return el("dl", el("dt", "counted"), el("dd", counted), el("dt", "divided by"), el("dd", divided))


def _window(run: Run) -> Html:
    return join([run.figure("window", "seconds"), " s"])


def _rates(run: Run) -> Html:
    scopes: list[tuple[Html | str, tuple[Key, ...]]] = [("all", ("system",))]
    scopes += [
        (run.word("deployments", d.name, "name"), ("deployments", d.name)) for d in run.report.deployments
    ]
    rows = [
        (
            name(shown, f": {KIND_NAMES[kind]}"),
            *(run.figure(*at, "throughput", kind, over, tag="td") for over in _DENOMINATORS),
        )
        for shown, at in scopes
        for kind in KIND_NAMES
    ]
    head = ("tokens/s", "in total", "per rank", "per node of the role", "per node of all")
    return fold("Every rate with every denominator", table(head, rows))


def cost(runs: Sequence[Run], price: float) -> Html:
    parts: list[Html] = []
    for run in runs:
        rows = []
        for c in costs(run.report, price):
            who = (
                "all nodes"
                if c.role is None
                else join(["nodes of ", run.word("deployments", c.role, "name")])
            )
            marks: Marks = {"data_run": run.index, "data_cost": f"{c.role or 'all'}.{c.kind}"}
            rows.append(
                (name(KIND_NAMES[c.kind]), cell(who, words=True), el("td", number(c.per_million), **marks))
            )
        parts += [
            run_heading(run, runs),
            table(("tokens", "charged to them", "cost of a million"), rows, words=[1]),
        ]
    text = el(
        "p",
        "At a price of ",
        el("span", number(price), data_price=True),
        " per node-hour: price / tokens an hour of a node. All nodes of the denominator are charged to one"
        " kind of token: with prefill and decode apart, the costs of their own tokens add up to what a"
        " request costs.",
        class_="dim small",
    )
    return section("cost", "Cost of tokens", join(parts), text)
