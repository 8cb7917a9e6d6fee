"""Rules of an effective plan that need the model or the machine: experts, dtypes, limits, memory.

Owns what makes a plan impossible for a model; `plan_rules` has what is impossible for any.
"""

from collections.abc import Iterator

from moe_runtime.plan.budget import MemoryBudget, largest_term, memory_budgets
from moe_runtime.plan.deepep import BACKEND as DEEPEP
from moe_runtime.plan.deepep import dtype_problem, mode_violations
from moe_runtime.plan.effective import EffectiveDeployment, EffectivePlan
from moe_runtime.plan.keys import DEPLOYMENTS
from moe_runtime.plan.load import LoadedPlan
from moe_runtime.plan.problems import Path, Problem, raise_problems
from moe_runtime.plan.unavailable import unavailable
from moe_runtime.spec.bytes import FP8_BLOCK, GIB, WIRE_BYTES
from moe_runtime.spec.hardware import HARDWARE
from moe_runtime.spec.limits import LIMITS, DispatchSizes, LimitKind, violations
from moe_runtime.spec.model import DTYPE_BYTES, MlaSpec, ModelSpec

OWN_KERNELS = ("torch", "triton")
CPU_DTYPES = ("float32", "bfloat16")


def validate(
    loaded: LoadedPlan | None,
    effective: EffectivePlan,
    model: ModelSpec,
    *,
    host_memory_bytes: int | None = None,
) -> tuple[MemoryBudget, ...]:
    """The memory budgets of a plan that can work, one per deployment; PlanError otherwise.

    `loaded` adds the lines of the plan file to messages; None for a plan that was not read from a
    file. `host_memory_bytes` is the memory of
    this machine (MemTotal of /proc/meminfo); without it a CPU plan is held against the nominal
    memory of its hardware entry.
    """
    problems = list(plan_limits(effective, model))
    budgets: tuple[MemoryBudget, ...] = ()
    if not problems:
        budgets = memory_budgets(effective, model)
        problems += _memory(effective, budgets, host_memory_bytes)
    raise_problems(problems, loaded.where if loaded else lambda _: "")
    return budgets


def plan_warnings(effective: EffectivePlan, model: ModelSpec) -> tuple[str, ...]:
    """A line per `tested` limit that a deployment goes beyond; reports carry them."""
    return tuple(
        f"{DEPLOYMENTS}.{d.name}: backend {d.dispatch.backend}, untested: {message}"
        for d in effective.deployments
        for message in _limit_messages(effective, d, d.served(model), "tested")
    )


def plan_limits(effective: EffectivePlan, model: ModelSpec) -> Iterator[Problem]:
    """What makes a plan impossible for a model, memory aside."""
    yield from unavailable(effective, tuple(effective.by_name.items()), effective.model.dtype)
    yield from _dtype(effective)
    yield from _kernels(effective, model)
    for d in effective.deployments:
        shared = list(_shared_experts(d, model))
        experts = shared or [*_experts(d, d.served(model)), *_payload(d, model)]
        device = [*_device(effective, d), *_balancing(effective, d)]
        yield from (*experts, *device)
        if not experts and not device:
            yield from _limits(effective, d, d.served(model))


def _kernels(effective: EffectivePlan, model: ModelSpec) -> Iterator[Problem]:
    for d in effective.deployments:
        if d.kernels.experts == "deepgemm" and d.dispatch.backend != DEEPEP:
            yield Problem(
                path=(DEPLOYMENTS, d.name, "kernels", "experts"),
                text=f"needs slots to start at multiples of 128 rows, unlike {d.dispatch.backend}'s",
                value=d.kernels.experts,
                hint=f"set it to auto, or dispatch.backend: {DEEPEP}",
            )
        if d.kernels.mla_decode not in OWN_KERNELS and not isinstance(model.attention, MlaSpec):
            yield Problem(
                path=(DEPLOYMENTS, d.name, "kernels", "mla_decode"),
                text=f"is not used: {model.family} has grouped-query attention",
                value=d.kernels.mla_decode,
                hint="set it to auto",
            )


def _dtype(effective: EffectivePlan) -> Iterator[Problem]:
    works = CPU_DTYPES if effective.cluster.device == "cpu" else tuple(DTYPE_BYTES)
    if effective.model.dtype not in works:
        yield Problem(
            path=("model", "dtype"),
            text=f"does not run on {effective.cluster.device}",
            value=effective.model.dtype,
            hint="set it to " + " or ".join(works),
        )


def _shared_experts(d: EffectiveDeployment, model: ModelSpec) -> Iterator[Problem]:
    moe = model.moe
    if d.shared_experts == "replicated" or (
        moe.shared_intermediate and not moe.shared_intermediate % moe.intermediate
    ):
        return
    text = f"cannot be served as slots: {model.family} has no shared experts"
    if moe.shared_intermediate:
        text = (
            f"cannot be served as slots: {model.family}'s have {moe.shared_intermediate} intermediate values,"
            f" no multiple of a slot's {moe.intermediate}"
        )
    yield Problem(
        path=_at(d, "shared_experts"), text=text, value=d.shared_experts, hint="set it to replicated"
    )


def _device(effective: EffectivePlan, d: EffectiveDeployment) -> Iterator[Problem]:
    """Backends that know one kind of device only."""
    needs = {"shm": "cpu", DEEPEP: "cuda"}.get(d.dispatch.backend, effective.cluster.device)
    if needs != effective.cluster.device:
        yield Problem(
            path=_at(d, "dispatch", "backend"),
            text=f"needs cluster.device: {needs}, which is {effective.cluster.device}",
            value=d.dispatch.backend,
            hint="set it to auto",
        )


def _balancing(effective: EffectivePlan, d: EffectiveDeployment) -> Iterator[Problem]:
    """Experts move between ranks that share memory; `unavailable_to_run` has what GPUs cannot do yet."""
    if not d.balancing.enabled:
        return
    nodes = effective.nodes_of_an_instance(d.name)
    text = ""
    if d.expert_parallel == 1:
        text = "has nothing to balance: the instance is one rank"
    elif nodes > 1 and effective.cluster.device == "cpu":
        text = f"moves experts within one node in this version; an instance spans {nodes}"
    if text:
        yield Problem(path=_at(d, "balancing", "enabled"), text=text, value=True, hint="set it to false")


def _experts(d: EffectiveDeployment, model: ModelSpec) -> Iterator[Problem]:
    experts, ranks, redundant = model.moe.slot_experts, d.expert_parallel, d.redundant_experts
    most = experts * (ranks - 1)
    if experts + redundant < ranks:
        yield Problem(
            path=_at(d, "expert_parallel"),
            text=f"leaves {ranks - experts - redundant} ranks without an expert: the model has {experts}"
            f" experts, redundant_experts is {redundant}",
            value=ranks,
            hint=f"set expert_parallel: {experts + redundant} or redundant_experts: {ranks - experts}",
        )
    elif redundant > most:
        yield Problem(
            path=_at(d, "redundant_experts"),
            text=f"makes a rank hold an expert twice ({experts} experts, {d.slots_per_rank} slots on each"
            f" of {ranks} ranks)",
            value=redundant,
            hint=f"set it to at most {most}",
        )


def _payload(d: EffectiveDeployment, model: ModelSpec) -> Iterator[Problem]:
    if d.dispatch.dtype == "float8_e4m3" and model.hidden % FP8_BLOCK:
        yield Problem(
            path=_at(d, "dispatch", "dtype"),
            text=f"needs hidden to be a multiple of {FP8_BLOCK}, a scale for each block;"
            f" hidden = {model.hidden}",
            value=d.dispatch.dtype,
            hint="set it to auto or bfloat16",
        )


def _limits(effective: EffectivePlan, d: EffectiveDeployment, model: ModelSpec) -> Iterator[Problem]:
    for message in _limit_messages(effective, d, model, "hard"):
        yield Problem(
            path=_at(d, "dispatch", "backend"),
            text=f"cannot carry this deployment: {message}",
            value=d.dispatch.backend,
            hint="set it to auto",
        )


def _limit_messages(
    effective: EffectivePlan, d: EffectiveDeployment, model: ModelSpec, kind: LimitKind
) -> Iterator[str]:
    sizes = DispatchSizes(
        ranks=d.expert_parallel,
        slots=d.num_slots,
        hidden=model.hidden,
        top_k=model.moe.slots_per_token,
        max_tokens=d.dispatch.max_tokens,
        row_bytes=model.hidden * WIRE_BYTES[d.dispatch.dtype],
        nodes=effective.nodes_of_an_instance(d.name),
    )
    if d.dispatch.backend == DEEPEP:
        if kind == "hard" and (problem := dtype_problem(effective.model.dtype, d.dispatch.dtype)):
            yield problem
        for mode, violation in mode_violations(d.dispatch, sizes):
            if violation.limit.kind == kind:
                yield f"{mode}: {violation.message}"
    elif d.dispatch.backend in LIMITS:
        for violation in violations(d.dispatch.backend, sizes):
            if violation.limit.kind == kind:
                yield violation.message


def _memory(
    effective: EffectivePlan, budgets: tuple[MemoryBudget, ...], host_memory_bytes: int | None
) -> Iterator[Problem]:
    """A CPU host holds all ranks together, whatever nodes they are grouped into; a device holds one."""
    hardware = HARDWARE[effective.cluster.hardware]
    if hardware.device == "cpu":
        memory = host_memory_bytes or hardware.memory_bytes
        counts = [d.ranks for d in effective.deployments]
        needed = sum(b.total * n for b, n in zip(budgets, counts, strict=True))
        if needed > memory:
            i, term = largest_term(budgets, counts)
            who = f"all {sum(counts)} ranks together take"
            yield _too_big(effective, i, budgets[i], term, needed, memory, counts[i], who)
        return
    for i, budget in enumerate(budgets):
        if budget.total > hardware.memory_bytes:
            _, term = largest_term([budget], [1])
            yield _too_big(
                effective, i, budget, term, budget.total, hardware.memory_bytes, 1, "each rank takes"
            )


def _too_big(
    effective: EffectivePlan,
    index: int,
    budget: MemoryBudget,
    term: str,
    needed: int,
    memory: int,
    sharers: int,
    who: str,
) -> Problem:
    """The problem at the key behind the largest term, with the most that fits where one key can mend it."""
    d = effective.deployments[index]
    size = dict(budget.terms)[term]
    room = size + (memory - needed) // sharers
    path, value, fits = _mend(d, term, size, room)
    unit = GIB if memory >= GIB else 2**20
    name = "GiB" if unit == GIB else "MiB"
    return Problem(
        path=path or ("model", "path"),
        text=f"does not fit: {who} {needed / unit:.2f} {name} of {memory / unit:.2f} {name};"
        f" the largest term is {term} of {d.name}, {size / unit:.2f} {name} per rank",
        value=value if path else effective.model.path,
        hint=f"{path[-1]}: {fits} fits"
        if path and fits is not None
        else f"it fits in {-(-needed * 100 // unit) / 100:.2f} {name}",
    )


def _mend(
    d: EffectiveDeployment, term: str, size: int, room: int
) -> tuple[Path | None, int | None, int | None]:
    """(key, its value, the most of it whose term takes at most `room` of `size` bytes, if any does)."""
    kv, tokens = d.kv_cache, d.dispatch.max_tokens
    match term:
        case "KV cache":
            fits, least = kv.blocks * room // size, -(-d.scheduler.chunk_tokens // kv.block_tokens)
            return _at(d, "kv_cache", "blocks"), kv.blocks, fits if fits >= least else None
        case "dispatch buffers":
            fits = tokens * room // size
            return _at(d, "dispatch", "max_tokens"), tokens, fits if fits > 0 else None
        case "redundant experts":
            return _at(d, "redundant_experts"), d.redundant_experts, 0 if room >= 0 else None
        case "workspace":
            return _at(d, "scheduler", "max_batch_tokens"), d.scheduler.max_batch_tokens, None
    return None, None, None


def _at(d: EffectiveDeployment, *keys: str) -> Path:
    return (DEPLOYMENTS, d.name, *keys)
