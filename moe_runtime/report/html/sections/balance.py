"""How evenly ranks were loaded: a map of layers and ranks, before and after balancing where that is known."""

from collections.abc import Sequence

from moe_runtime.report.html.axes import panel
from moe_runtime.report.html.figures import Run, count
from moe_runtime.report.html.heat import heat_legend, heat_map
from moe_runtime.report.html.markup import Html, el, join
from moe_runtime.report.html.parts import of_run, role_heading, role_names, role_of, section
from moe_runtime.report.html.tables import cell, fold, name, table, word
from moe_runtime.report.schema import Deployment
from moe_runtime.report.show import number

_MOST_RANKS = 32  # up to which a table has a column for each


def balance(runs: Sequence[Run]) -> Html | None:
    parts = [part for role in role_names(runs) for part in _role(role, runs)]
    if not parts:
        return None
    text = el(
        "p",
        "Rows that the slots of a rank received over the mean of all ranks, by MoE layer, over the steps of"
        " the window; before balancing with the oldest placement of experts, after it with the newest. Of a"
        " simulated run: long-run loads, before balancing with the experts in order. A step waits for its"
        " most loaded rank. Steps run one by one, and a single step is less even than their sum: the"
        " balancedness below (mean load / max load, an even layer has one) is of steps.",
        class_="dim small",
    )
    return section("balance", "Balance of the ranks", text, heat_legend(), join(parts))


def _role(role: str, runs: Sequence[Run]) -> list[Html]:
    """The maps of all runs beside each other, and below them their tables."""
    shown = [(r, d) for r in runs if (d := role_of(r, role)) is not None and d.expert_parallel > 1]
    if not shown:
        return []
    charts = [chart for run, d in shown for chart in _maps(run, d, runs)]
    tables = [
        fold_
        for run, d in shown
        for fold_ in (_layers(run, d, runs), *_loads(run, d, runs), *_changes(run, d, runs))
    ]
    return [role_heading(role), el("div", *charts, class_="panels two"), *tables]


def _maps(run: Run, d: Deployment, runs: Sequence[Run]) -> list[Html]:
    if d.rank_loads is None:
        why = run.reason("deployments", d.name, "rank_loads")
        return [panel(of_run(run, runs, "load of the ranks"), "n/a: ", el("span", why, data_reason=True))]
    if d.rank_loads.before is None:
        return [_map(run, d, "after", of_run(run, runs, "load of the ranks"))]
    return [_map(run, d, part, of_run(run, runs, f"{part} balancing")) for part in ("before", "after")]


def _map(run: Run, d: Deployment, part: str, title: Html) -> Html:
    path = ("deployments", d.name, "rank_loads", part)
    picture = heat_map(
        f"Load of each rank of {d.name} over the mean, by layer, {part} balancing",
        _layer_numbers(d),
        run.value(*path),
        path,
        run.index,
    )
    unit = join(
        ["layers down, ranks of ", run.word("deployments", d.name, "rank_loads", "instance"), " across"]
    )
    return panel(title, unit, picture)


def _layer_numbers(d: Deployment) -> list[int]:
    return [b.layer for b in d.balancedness]


def _layers(run: Run, d: Deployment, runs: Sequence[Run]) -> Html:
    """Balancedness of steps."""
    at = ("deployments", d.name, "balancedness")
    rows = [
        (
            name(run.figure(*at, i, "layer", form=count)),
            *(run.figure(*at, i, field, tag="td") for field in ("mean", "p5", "of_sum")),
            run.figure(*at, i, "steps", form=count, tag="td"),
        )
        for i in range(len(d.balancedness))
    ]
    head = ("layer", "mean of steps", "p5 of steps", "of the summed load", "steps")
    return fold(of_run(run, runs, "balancedness by layer"), table(head, rows))


def _loads(run: Run, d: Deployment, runs: Sequence[Run]) -> list[Html]:
    """The maps as tables: every rank, or of many ranks the highest and the lowest."""
    if d.rank_loads is None:
        return []
    if d.rank_loads.before is None:
        return [fold(of_run(run, runs, "loads by rank"), _load_table(run, d, "after"))]
    return [
        fold(of_run(run, runs, f"loads by rank {part}"), _load_table(run, d, part))
        for part in ("before", "after")
    ]


def _changes(run: Run, d: Deployment, runs: Sequence[Run]) -> list[Html]:
    """What was decided about the places of experts."""
    if d.balancing is None or not d.balancing.rebalances:
        return []
    at = ("deployments", d.name, "balancing", "rebalances")
    figures = (
        ("moves", count),
        ("moved_bytes", count),
        ("balancedness_before", _fine),
        ("balancedness_after", _fine),
        ("balancedness_predicted", _fine),
        ("seconds", number),
    )
    rows = [
        (
            name(run.word(*at, i, "instance")),
            run.figure(*at, i, "decided", tag="td"),
            word(run.word(*at, i, "action")),
            cell(run.word(*at, i, "reason"), words=True),
            *(run.figure(*at, i, field, form=form, tag="td") for field, form in figures),
            word(run.word(*at, i, "outcome")),
            cell(run.word(*at, i, "why"), words=True),
        )
        for i in range(len(d.balancing.rebalances))
    ]
    before_after = ("balancedness before", "after", "as the balancer expected")
    head = (
        "instance",
        "at, s",
        "what",
        "why",
        "slots",
        "bytes",
        *before_after,
        "seconds",
        "outcome",
        "because",
    )
    return [fold(of_run(run, runs, "experts that moved"), table(head, rows, words=(2, 3, 10, 11)))]


def _load_table(run: Run, d: Deployment, part: str) -> Html:
    loads: Sequence[Sequence[float]] = getattr(d.rank_loads, part)
    at = ("deployments", d.name, "rank_loads", part)
    ranks = max(map(len, loads), default=0)
    every = ranks <= _MOST_RANKS
    rows = []
    for i, row in enumerate(loads):
        cells = [name(run.figure("deployments", d.name, "balancedness", i, "layer", form=count))]
        if every:
            cells += [run.figure(*at, i, rank, form=_fine, tag="td") for rank in range(len(row))]
        else:
            for rank in (row.index(max(row)), row.index(min(row))):
                cells += [run.figure(*at, i, rank, form=_fine, tag="td"), el("td", str(rank), data_rank=part)]
        rows.append(cells)
    head = [f"rank {r}" for r in range(ranks)] if every else ["highest", "of rank", "lowest", "of rank"]
    return table([el("span", h, class_="tick") for h in ("layer", *head)], rows)


def _fine(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
