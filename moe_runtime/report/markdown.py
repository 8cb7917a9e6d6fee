"""Reports as Markdown: the tables of the page, for a pull request or a wiki. Pure.

Names are escaped, so that they stay text in Markdown and in the HTML it may become.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from moe_runtime.report.compare import differences
from moe_runtime.report.cost import costs
from moe_runtime.report.reference import Reference
from moe_runtime.report.schema import Deployment, Percentiles, Rate, Report
from moe_runtime.report.show import number, percent, percentile_cells, role

Named = Sequence[tuple[str, Report]]
_SPECIAL = re.compile(r"([\\`*_\[\]|<>&~$])")
_KINDS = {"output": "output", "new_prefill": "new prefill", "cached_prefill": "cached prefill"}
_LATENCIES = {
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "itl_ms": "between tokens, ms",
    "end_to_end_ms": "end to end, ms",
}
_DEPLOYMENT: dict[str, Callable[[Deployment], str]] = {
    "instances": lambda d: number(len(d.instances)),
    "EP degree": lambda d: number(d.expert_parallel),
    "redundant experts": lambda d: number(d.redundant_experts),
    "steps": lambda d: number(d.steps),
    "mean step, ms": lambda d: number(d.mean_step_ms),
    "step fill": lambda d: percent(d.step_fill),
    "KV blocks used, peak": lambda d: percent(d.kv.peak_fraction),
    "worst layer's balancedness": lambda d: number(
        min((b.mean for b in d.balancedness if b.mean is not None), default=None)
    ),
    "transport time hidden": lambda d: percent(d.hidden),
}


def render_markdown(
    reports: Named, references: Sequence[Reference] = (), price_per_node_hour: float | None = None
) -> str:
    """Named reports as Markdown text."""
    parts = ["# " + (escape(reports[0][1].model.path) if len(reports) == 1 else "Runs side by side")]
    parts += [_runs(reports), _warnings(reports)]
    parts += ["## Throughput per node, tokens/s", _throughput(reports), _DENOMINATOR]
    parts += ["## Latency", _latency(reports), _goodput(reports)]
    parts += ["## Deployments", _deployments(reports)]
    times = _phases(reports)
    parts += ["## Where time goes, share of a step", times] if times else []
    if price_per_node_hour is not None:
        parts += [
            f"## Cost of a million tokens, at {price_per_node_hour:g} per node-hour",
            _costs(reports, price_per_node_hour),
        ]
    if references:
        parts += ["## Published figures", _references(references)]
    return "\n\n".join(part for part in parts if part) + "\n"


_DENOMINATOR = (
    "Over the window. Output tokens that reached clients; prompt tokens computed, or found in a cache. Nodes"
    " of the role are its ranks / ranks per node."
)


def escape(value: str) -> str:
    """Text of one line that Markdown leaves alone."""
    return _SPECIAL.sub(r"\\\1", " ".join(value.split()))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Cells are Markdown already; the first `words` columns are text, the others figures."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    lines = [head, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _runs(reports: Named) -> str:
    rows = [
        (
            escape(name),
            "simulated" if r.simulated else "measured",
            escape(r.model.path),
            escape(r.machine.hardware),
            escape(r.plan_digest),
            escape(r.created),
            number(r.window.seconds),
        )
        for name, r in reports
    ]
    return _table(("run", "", "model", "hardware", "plan", "created", "window, s"), rows, words=6)


def _warnings(reports: Named) -> str:
    lines = [f"{escape(name)}: {escape(w)}" for name, r in reports for w in r.warnings]
    lines += [escape(note) for note in differences([r for _, r in reports])] if len(reports) > 1 else []
    return "\n".join(f"> - {line}" for line in lines)


def _throughput(reports: Named) -> str:
    rows = []
    for name, r in reports:
        scopes = [("all", r.system.throughput), *((escape(role(d)), d.throughput) for d in r.deployments)]
        for scope, of in scopes:
            for field, kind in _KINDS.items():
                rate: Rate = getattr(of, field)
                figures = (rate.total, rate.per_rank, rate.per_node_of_role, rate.per_node_of_all)
                rows.append((escape(name), scope, kind, *map(number, figures)))
    head = ("run", "role", "tokens", "in total", "per rank", "per node of the role", "per node of all")
    return _table(head, rows, words=3)


def _latency(reports: Named) -> str:
    rows = []
    for name, r in reports:
        for field, shown in _LATENCIES.items():
            found: Percentiles | None = getattr(r.latency, field)
            rows.append((escape(name), shown, *percentile_cells(found)))
    return _table(("run", "", "mean", "p50", "p90", "p99"), rows, words=2)


def _goodput(reports: Named) -> str:
    rows = [
        (
            escape(name),
            number(r.goodput.requests_per_second),
            percent(r.goodput.fraction),
            number(r.goodput.ttft_slo_ms),
            number(r.goodput.tpot_slo_ms),
            f"{r.requests.failed} of {r.requests.count}",
        )
        for name, r in reports
    ]
    head = ("run", "goodput, requests/s", "of the requests", "TTFT within, ms", "TPOT within, ms", "failed")
    return _table(head, rows)


def _deployments(reports: Named) -> str:
    columns = [(name, d) for name, r in reports for d in r.deployments]
    head = ["", *(escape(f"{name}: {role(d)}" if len(reports) > 1 else role(d)) for name, d in columns)]
    return _table(head, ([shown, *(of(d) for _, d in columns)] for shown, of in _DEPLOYMENT.items()))


def _phases(reports: Named) -> str:
    """Measured runs by phase; what a simulation attributes stands beside it by its own names."""
    columns = []
    for name, r in reports:
        for d in r.deployments:
            shares = {p.phase: p.share for p in d.phases}
            if d.attribution is not None:
                shares |= {part.name: part.share for part in d.attribution.total.parts}
            if shares:
                columns.append((f"{name}: {d.name}" if len(reports) > 1 else d.name, shares))
    names = dict.fromkeys(n for _, shares in columns for n in shares)
    rows = ([escape(n), *(percent(s[n]) if n in s else "" for _, s in columns)] for n in names)
    return _table(["", *(escape(c) for c, _ in columns)], rows) if columns else ""


def _costs(reports: Named, price: float) -> str:
    rows = [
        (
            escape(name),
            c.kind.replace("_", " "),
            escape(c.nodes),
            number(c.per_million),
        )
        for name, r in reports
        for c in costs(r, price)
    ]
    return _table(("run", "tokens", "charged to them", "cost"), rows, words=3)


def _references(references: Sequence[Reference]) -> str:
    rows = [
        (
            r.role,
            f"{r.gpus} {escape(r.machine)}",
            escape(r.conditions),
            escape(r.read),
            escape(r.source),
            number(r.value),
        )
        for r in references
    ]
    return _table(("role", "of GPUs", "conditions", "read", "source", "tokens/s"), rows, words=5)
