"""Published figures of the same model beside the run's own, with their conditions."""

from collections.abc import Sequence

from moe_runtime.report.html.figures import Run, count
from moe_runtime.report.html.markup import Html, el, join
from moe_runtime.report.html.parts import color, role_heading, role_names, run_name, section, swatch
from moe_runtime.report.html.scale import place
from moe_runtime.report.html.tables import cell, table
from moe_runtime.report.reference import Reference
from moe_runtime.report.show import number

_KINDS = {"prefill": "new_prefill", "decode": "output"}
_HEAD = ("tokens/s per GPU", "as published", "of GPUs", "conditions", "read", "source")
_BAR = 96.0


def published(runs: Sequence[Run], references: Sequence[Reference]) -> Html:
    if not references:
        text = el("p", "No published figures of this model are known to moe-runtime.", class_="dim")
        return section("published", "Published figures", text)
    models = join(el("bdi", m, data_ref="model") for m in dict.fromkeys(r.model for r in references))
    text = el(
        "p",
        "Of ",
        models,
        ": new prompt tokens/s of prefill and output tokens/s of decode, per node of the role, and per GPU"
        " as nodes differ. Every figure has conditions of its own, and its hardware may not be the run's:"
        " compare with those that match. Cache hits and averages of production are named where a source has"
        " them.",
        class_="dim small",
    )
    roles = [role for role in _KINDS if any(r.role == role for r in references)]
    tables = [
        part
        for role in roles
        for part in (role_heading(role), _table(role, runs, [r for r in references if r.role == role]))
    ]
    return section("published", "Published figures", text, join(tables))


def _table(role: str, runs: Sequence[Run], references: Sequence[Reference]) -> Html:
    own = [(run, _per_rank(run, role)) for run in runs if role in role_names([run])]
    most = max([*map(_per_gpu, references), *(value for _, value in own)])
    rows = [_run_row(run, role, _bar(value, most, color(run.index))) for run, value in own]
    rows += [_row(r, most) for r in sorted(references, key=_per_gpu, reverse=True)]
    return table(_HEAD, rows, words=range(2, len(_HEAD)), class_="stack")


def _per_gpu(r: Reference) -> float:
    return r.value / r.gpus


def _per_rank(run: Run, role: str) -> float:
    return float(run.value("deployments", role, "throughput", _KINDS[role], "per_rank"))


def _row(r: Reference, most: float) -> tuple[Html, ...]:
    def of(field: str, shown: str) -> Html:
        return el("span", shown, data_ref=f"{r.id}.{field}")

    return (
        cell(of("per_gpu", number(_per_gpu(r))), _bar(_per_gpu(r), most, "s9")),
        cell(of("value", number(r.value))),
        cell(of("gpus", str(r.gpus)), " x ", of("machine", r.machine), words=True),
        cell(of("conditions", r.conditions), words=True),
        cell(of("read", r.read), words=True),
        cell(of("source", r.source), words=True),
    )


def _run_row(run: Run, role: str, bar: Html) -> tuple[Html, ...]:
    at = ("deployments", role)
    rate = (*at, "throughput", _KINDS[role])
    conditions = [
        "EP ",
        run.figure(*at, "expert_parallel", form=count),
        ", ",
        run.figure(*at, "redundant_experts", form=count),
        " redundant experts",
    ]
    return (
        cell(el("b", run.figure(*rate, "per_rank")), bar),
        cell(el("b", run.figure(*rate, "per_node_of_role"))),
        cell("a node, ", run.word("machine", "hardware"), words=True),
        cell(join(conditions), words=True),
        cell("simulated" if run.report.simulated else "measured", words=True),
        cell(swatch(run), run_name(run), words=True),
    )


def _bar(value: float, most: float, color: str) -> Html:
    width = max(1.0, _BAR * value / most) if most > 0 else 1.0
    bar = el("rect", x=0, y=0, width=place(width), height=10, class_=f"bar {color}")
    return el("svg", bar, viewBox=f"0 0 {_BAR:g} 10", class_="inline", aria_hidden="true")
