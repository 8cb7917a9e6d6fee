"""What sections share: their frame, headings of runs and roles, and the colours of runs."""

from collections.abc import Sequence

from moe_runtime.report.html.figures import Run
from moe_runtime.report.html.markup import Child, Html, el, join, text
from moe_runtime.report.schema import Deployment

COLORS = 10  # classes s0 to s9 of the style


def section(ident: str, title: str, *children: Child) -> Html:
    return el("section", el("h2", title, id=ident), *children)


def run_name(run: Run) -> Html:
    """What the reader calls the run; it is no field of the report."""
    return el("bdi", run.name, data_name=run.index)


def run_heading(run: Run, runs: Sequence[Run]) -> Html:
    """Names the run where there are several."""
    return el("h3", swatch(run), run_name(run)) if len(runs) > 1 else Html()


def role_heading(role: str) -> Html:
    return el("h3", el("bdi", role, data_name="role"), class_="role")


def of_run(run: Run, runs: Sequence[Run], what: str) -> Html:
    """`what`, with the run's name before it where there are several."""
    if len(runs) == 1:
        return text(what.capitalize())
    return el("span", swatch(run), run_name(run), ": ", what)


def color(index: int) -> str:
    return f"s{index % COLORS}"


def swatch(run: Run) -> Html:
    return el("i", class_=f"key {color(run.index)}")


def role_names(runs: Sequence[Run]) -> list[str]:
    """Roles of all runs, in the order they appear."""
    return list(dict.fromkeys(d.name for run in runs for d in run.report.deployments))


def role_of(run: Run, role: str) -> Deployment | None:
    return next((d for d in run.report.deployments if d.name == role), None)


def bullets(items: Sequence[Child]) -> Html:
    return el("ul", join(el("li", item) for item in items))
