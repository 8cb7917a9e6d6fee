"""`moe-runtime plan`: the best deployments for a model, a cluster and a workload, printed and written."""

import argparse
import json
from pathlib import Path

from moe_runtime.errors import InputError
from moe_runtime.files import make_folder, write_atomically
from moe_runtime.frontend.trace import TraceRequest, read_trace
from moe_runtime.launch.console import say, show
from moe_runtime.launch.preflight import preflight
from moe_runtime.models.families.registry import read_spec
from moe_runtime.spec.catalog import CATALOG, PREFIX, catalog_name
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.cost.loads import deepseek_v3
from moe_runtime.virtual.search.candidate import Candidate
from moe_runtime.virtual.search.query import Query, Workload, parse_objectives, parse_workload, recorded
from moe_runtime.virtual.search.render import render, render_change
from moe_runtime.virtual.search.search import Found, search
from moe_runtime.virtual.search.what_if import again, changed
from moe_runtime.virtual.search.write import expectation, launch_lines, plan_text

MOST_FILES = 4


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    name, model = _model(arguments.model)
    query = Query(
        name=name,
        model=model,
        hardware=arguments.hardware,
        nodes=arguments.nodes,
        workload=_workload(arguments.workload),
        objectives=parse_objectives(arguments.slo),
        known=constants(),
    )
    if arguments.out is not None:
        make_folder(arguments.out)
    questions = [(text, changed(query, text)) for text in arguments.what_if]
    found = search(query)
    show(render(found, price_per_node_hour=arguments.price_per_node_hour))
    for text, other in questions:
        show("\n" + _answer(found, text, other))
    if arguments.out is not None:
        _write(found, arguments.out, argv)
    return 0


def _model(text: str) -> tuple[str, ModelSpec]:
    """(`model.path` of the plans, sizes) of a catalog's name or a checkpoint's folder."""
    name = catalog_name(text) or text
    if name in CATALOG:
        return PREFIX + name, CATALOG[name]
    folder = Path(text)
    if catalog_name(text) is not None or not text or not folder.is_dir():
        raise InputError(f"--model {text!r}: neither a checkpoint's folder nor one of {', '.join(CATALOG)}")
    return str(folder.resolve()), read_spec(folder)


def _workload(text: str) -> Workload:
    path = Path(text)
    if not text or ("=" in text and not path.exists()):
        return parse_workload(text)
    requests = read_trace(path)
    if any(r.prompt is not None for r in requests):
        raise InputError(f"--workload {text}: requests with text have no lengths without a tokenizer")
    seen: set[int] = set()
    return recorded((r.input_length, r.output_length, _cached(r, seen)) for r in requests)


def _cached(request: TraceRequest, seen: set[int]) -> float:
    """Prompt tokens whose blocks came before, all of them kept; at least one token is computed."""
    known = 0
    for block in request.hash_ids:
        if block not in seen:
            break
        known += 1
    seen.update(request.hash_ids)
    return min(known * request.block_tokens, request.input_length - 1)


def _answer(found: Found, text: str, query: Query) -> str:
    after: Found | str
    try:
        after = search(query)
    except InputError as error:
        after = str(error)
    return render_change(found, query, after, again(query, found.winner), text)


def _write(found: Found, folder: Path, argv: list[str]) -> None:
    query = found.query
    if found.plan is None:
        say("nothing is written: plans of this version cannot say any of the plans within the objectives")
        return
    show("")
    loads = _write_loads(folder) if found.recorded and query.balanced else None
    files = [(found.plan, folder / "best.yaml")]
    others = [c for c in found.front if c.written and c.meets(query.objectives) and c is not found.plan]
    files += [(c, folder / f"faster-{i}.yaml") for i, c in enumerate(others[: MOST_FILES - 1], 1)]
    for candidate, path in files:
        _write_plan(query, candidate, path, loads, argv)
    _say_how(query, *files[0])


def _write_loads(folder: Path) -> dict[str, str]:
    """The loads that the search assumed, as files that plans can name."""
    names = {}
    for role in ("prefill", "decode"):
        load_LE = (deepseek_v3(role) * 1e5).round().astype(int)
        names[role] = f"expert-loads-{role}.json"
        text = json.dumps({"about": f"recorded {role} loads, in 1e-5 of a layer's", "load": load_LE.tolist()})
        write_atomically(folder / names[role], (text + "\n").encode())
    return {**names, "unified": names["decode"]}


def _write_plan(
    query: Query, candidate: Candidate, path: Path, loads: dict[str, str] | None, argv: list[str]
) -> None:
    about = [f"moe-runtime {' '.join(argv)}", *expectation(query, candidate)]
    if loads is None:
        about.append("Experts are assumed to sit where the balancer puts them: record loads with")
        about.append("--dump-expert-load, and set each deployment's balancing.initial to them.")
    write_atomically(path, plan_text(query, candidate, about=tuple(about), loads=loads).encode())
    preflight(path, (), check_tensors=False, to_run=False)  # a plan that `check` refuses is not handed out
    show(
        f"wrote {path}: {candidate.throughput:,.0f} output tokens/s per node, {candidate.speed:.1f} per user"
    )


def _say_how(query: Query, candidate: Candidate, path: Path) -> None:
    show("launch with one of")
    for line in launch_lines(query, candidate, str(path)):
        show(f"  {line}")
    obstacles = [p.text for p in preflight(path, (), check_tensors=False, to_run=False).obstacles]
    if candidate.ranks > query.ranks_per_node:
        obstacles.append("launchers over several hosts are not available in this version")
    if obstacles:
        show("not with this version on this machine: " + "; ".join(dict.fromkeys(obstacles)))
