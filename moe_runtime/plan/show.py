"""What `check` says of a plan: the effective plan with the origin of every value, and bytes per rank.

Owns words and columns, for a terminal of 100 columns; computes nothing that is not in its arguments.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from moe_runtime.plan.budget import MemoryBudget
from moe_runtime.plan.deepep import BACKEND as DEEPEP
from moe_runtime.plan.deepep import registered_bytes
from moe_runtime.plan.effective import EffectiveDeployment, EffectivePlan
from moe_runtime.plan.keys import DEPLOYMENTS, leaf_paths
from moe_runtime.plan.load import LoadedPlan
from moe_runtime.plan.problems import Path, Problem, dotted
from moe_runtime.plan.validate import plan_warnings
from moe_runtime.spec.bytes import even_redundant_experts, parameter_counts
from moe_runtime.spec.model import MlaSpec, ModelSpec

MIB = 2**20
WIDTH = 100
_KEY, _VALUE = 29, 11


def render_check(
    effective: EffectivePlan,
    loaded: LoadedPlan,
    model: ModelSpec,
    budgets: Sequence[MemoryBudget],
    obstacles: Sequence[Problem] = (),
) -> str:
    """The report of `check` as plain text, without a newline at the end.

    `obstacles` are what keeps the plan from running on this machine.
    """
    sections = (
        _head(effective, loaded, model),
        _values(effective, loaded),
        _ranks(effective),
        _memory(effective, budgets),
        _notes(effective, model, budgets, obstacles),
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def check_json(
    effective: EffectivePlan,
    loaded: LoadedPlan,
    model: ModelSpec,
    budgets: Sequence[MemoryBudget],
    obstacles: Sequence[Problem] = (),
) -> dict[str, Any]:
    """The same as JSON types: plan, origins, model, memory_per_rank, notes, warnings, obstacles."""
    derived = dict(effective.derived)
    return {
        "version": 1,
        "plan_file": str(loaded.path),
        "overrides": list(loaded.overrides),
        "digest": effective.digest,
        "plan": effective.to_json(),
        "origins": {key: _origin(key, loaded, derived) for key in loaded.origins},
        "model": {
            "family": model.family,
            "parameters": parameter_counts(model).total,
            "active_parameters": parameter_counts(model).active,
        },
        "memory_per_rank": {b.deployment: {**asdict(b), "total": b.total} for b in budgets},
        "notes": list(_note_lines(effective, model, budgets)),
        "warnings": list(plan_warnings(effective, model)),
        "obstacles": [_obstacle(p) for p in obstacles],
    }


def _head(effective: EffectivePlan, loaded: LoadedPlan, model: ModelSpec) -> Iterator[str]:
    counts, moe = parameter_counts(model), model.moe
    attention = "MLA" if isinstance(model.attention, MlaSpec) else "GQA"
    yield f"plan    {loaded.path}"
    yield f"digest  {effective.digest}"
    yield (
        f"model   {model.family}, {attention}, {model.num_layers} layers, {model.num_moe_layers} with"
        f" experts, hidden {model.hidden}"
    )
    yield (
        f"        {moe.num_experts} experts, top {moe.router.top_k};"
        f" {_count(counts.total)} parameters, {_count(counts.active)} per token"
    )


def _values(effective: EffectivePlan, loaded: LoadedPlan) -> Iterator[str]:
    """Every key under the heading of its section, with value and origin."""
    derived = dict(effective.derived)
    heading = ""
    for path in leaf_paths([d.name for d in effective.deployments]):
        depth = 2 if path[0] == DEPLOYMENTS else 1
        if heading != (heading := dotted(path[:depth])):
            yield heading
        key, value = dotted(path[depth:]), _text(_value(effective, path))
        origin = _origin(dotted(path), loaded, derived)
        if len(value) > _VALUE:
            yield f"  {key:<{_KEY}} {value}"
            key, value = "", ""
        yield f"  {key:<{_KEY}} {value:<{_VALUE}} {origin}"


def _ranks(effective: EffectivePlan) -> Iterator[str]:
    c = effective.cluster
    yield f"ranks   {effective.num_ranks} = nodes {c.nodes} x ranks_per_node {c.ranks_per_node}"
    for instance in effective.instances:
        ranks = instance.ranks
        nodes = sorted({effective.node_of(r) for r in ranks})
        yield (
            f"  {instance.name:<12} ranks {_span(ranks[0], ranks[-1]):<12} EP degree {len(ranks):<5}"
            f" node{'s' if len(nodes) > 1 else ''} {_span(nodes[0], nodes[-1])}"
        )
    for d in effective.deployments:
        yield f"  nodes of {d.name}: {d.ranks} ranks / {c.ranks_per_node} = {d.nodes:g}"


def _memory(effective: EffectivePlan, budgets: Sequence[MemoryBudget]) -> Iterator[str]:
    yield "bytes per rank, MiB" + " " * 5 + "".join(f"{b.deployment:>16}" for b in budgets)
    for i, (name, _) in enumerate(budgets[0].terms):
        yield f"  {name:<22}" + "".join(f"{b.terms[i][1] / MIB:>16,.2f}" for b in budgets)
    yield f"  {'total':<22}" + "".join(f"{b.total / MIB:>16,.2f}" for b in budgets)
    counts = [d.ranks for d in effective.deployments]
    yield f"  {'x ranks':<22}" + "".join(
        f"{b.total * n / MIB:>16,.2f}" for b, n in zip(budgets, counts, strict=True)
    )
    together = sum(b.total * n for b, n in zip(budgets, counts, strict=True))
    yield f"  {'all ranks together':<22}{together / MIB:>16,.2f}"


def _notes(
    effective: EffectivePlan,
    model: ModelSpec,
    budgets: Sequence[MemoryBudget],
    obstacles: Sequence[Problem],
) -> Iterator[str]:
    yield "notes"
    warnings = (f"warning: {text}" for text in plan_warnings(effective, model))
    cannot = (f"does not run here: {_obstacle(p)}" for p in obstacles)
    for text in (*_note_lines(effective, model, budgets), *warnings, *cannot):
        yield from wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _obstacle(problem: Problem) -> str:
    return f"{dotted(problem.path)}: {problem.text} (found {problem.value}); {problem.hint}"


def _note_lines(effective: EffectivePlan, model: ModelSpec, budgets: Sequence[MemoryBudget]) -> Iterator[str]:
    for d in effective.deployments:
        yield _slots_note(d, d.served(model))
        yield from _dispatch_notes(d, model)
        tokens = d.kv_cache.blocks * d.kv_cache.block_tokens
        yield f"{d.name}: the KV cache of a rank holds {tokens} tokens, {d.kv.token_bytes} bytes each"
    if effective.cluster.device == "cpu" and effective.cluster.nodes > 1:
        yield (
            f"all ranks run on this host; grouping them into {effective.cluster.nodes} nodes sets the"
            " report's denominators, and instances over several of them agree and dispatch as between hosts"
        )
    yield from dict.fromkeys(note for b in budgets for note in b.notes)


def _slots_note(d: EffectiveDeployment, model: ModelSpec) -> str:
    """`model` as the deployment serves it."""
    moe = model.moe
    experts = moe.slot_experts
    shared = f" + {moe.shared_slots} shared" if moe.shared_slots else ""
    text = (
        f"{d.name}: {moe.num_experts} experts{shared} + {d.redundant_experts} redundant in {d.num_slots}"
        f" slots, {d.slots_per_rank} per rank"
    )
    if not d.surplus_slots:
        return text
    used = even_redundant_experts(experts, d.redundant_experts, d.expert_parallel)
    return f"{text}; surplus slots: {d.surplus_slots}, used with redundant_experts: {used}"


def _dispatch_notes(d: EffectiveDeployment, model: ModelSpec) -> Iterator[str]:
    dispatch = d.dispatch
    if dispatch.mode == "per_step":
        yield (
            f"{d.name}: a step is dispatched in low-latency mode if all ranks only decode and one round of"
            f" {dispatch.max_tokens} rows per rank carries it, in normal mode otherwise"
        )
    if dispatch.backend == DEEPEP:
        buffers = registered_bytes(dispatch, hidden=model.hidden, slots=d.num_slots, ranks=d.expert_parallel)
        sizes = ", ".join(f"{mode} {size / MIB:,.2f} MiB" for mode, size in buffers.items())
        yield f"{d.name}: DeepEP registers per rank, for {d.num_slots} physical experts: {sizes}"


def _origin(key: str, loaded: LoadedPlan, derived: Mapping[str, str]) -> str:
    origin = str(loaded.origins[key])
    return f"derived: {derived[key]} (auto: {origin})" if key in derived else origin


def _value(effective: EffectivePlan, path: Path) -> object:
    value: object = effective
    if path[0] == DEPLOYMENTS:
        value, path = effective.deployment(path[1]), path[2:]
    for name in path:
        value = getattr(value, name)
    return value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _count(parameters: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if parameters >= unit:
            return f"{parameters / unit:.2f} {name}"
    return str(parameters)
