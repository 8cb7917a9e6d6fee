"""Rules between keys that need no model: what `load_plan` checks once every key is well formed."""

import os
import sys
from collections.abc import Iterator, Sequence

from moe_runtime.plan.deepep import BACKEND as DEEPEP
from moe_runtime.plan.keys import DEPLOYMENTS
from moe_runtime.plan.problems import Path, Problem, nearest
from moe_runtime.plan.schema import DeploymentSection, Plan
from moe_runtime.plan.unavailable import unavailable
from moe_runtime.spec.catalog import CATALOG, PREFIX, catalog_name
from moe_runtime.spec.hardware import HARDWARE


def plan_problems(plan: Plan) -> Iterator[Problem]:
    """Everything wrong with a well-formed plan, in the order of its sections."""
    dtype = None if plan.model.dtype == "auto" else plan.model.dtype
    yield from unavailable(plan, tuple(plan.deployments.items()), dtype)
    yield from _text(plan)
    yield from _catalog(plan)
    yield from _hardware(plan)
    names = list(_deployment_names(plan))
    yield from names or _ranks(plan)
    for name, deployment in plan.deployments.items():
        yield from _deployment(name, deployment)
    yield from _block_tokens(plan)
    yield from _deterministic(plan)
    yield from _kernels(plan)


def total_ranks(plan: Plan) -> int:
    return sum(d.instances * d.expert_parallel for d in plan.deployments.values())


def _text(plan: Plan) -> Iterator[Problem]:
    """Neither the file system, a socket nor a log takes control characters."""
    server = plan.server
    files: list[tuple[Path, str]] = [(("model", "path"), plan.model.path)]
    files += [
        ((DEPLOYMENTS, n, "balancing", "initial"), d.balancing.initial) for n, d in plan.deployments.items()
    ]
    names: list[tuple[Path, str]] = [
        (("server", "host"), server.host),
        (("server", "served_name"), server.served_name),
    ]
    for path, value in files + names:
        if not value.isprintable():
            yield Problem(path=path, text="has unprintable characters", value=value, hint="leave them out")
    for path, value in files:
        try:
            os.fsencode(value)
        except UnicodeEncodeError:
            text = f"cannot be a path here: the locale's encoding is {sys.getfilesystemencoding()}"
            yield Problem(path=path, text=text, value=value, hint="set PYTHONUTF8=1")


def _catalog(plan: Plan) -> Iterator[Problem]:
    name = catalog_name(plan.model.path)
    if name is None or name in CATALOG:
        return
    text = "is not a model of the catalog"
    yield Problem(
        path=("model", "path"), text=text, value=plan.model.path, hint=_meant(name, list(CATALOG), PREFIX)
    )


def _meant(name: str, known: Sequence[str], prefix: str = "") -> str:
    near = nearest(name, known)
    return "known: " + ", ".join(known) if near is None else f"did you mean {prefix}{near}?"


def _hardware(plan: Plan) -> Iterator[Problem]:
    name = plan.cluster.hardware
    path = ("cluster", "hardware")
    if name not in HARDWARE:
        hint = _meant(name, list(HARDWARE))
        yield Problem(path=path, text="is not a known hardware entry", value=name, hint=hint)
    elif HARDWARE[name].device != plan.cluster.device:
        fitting = [h.name for h in HARDWARE.values() if h.device == plan.cluster.device]
        yield Problem(
            path=path,
            text=f"is not for cluster.device: {plan.cluster.device}",
            value=name,
            hint="set it to " + " or ".join(fitting),
        )


def _deployment_names(plan: Plan) -> Iterator[Problem]:
    names = set(plan.deployments)
    if names in ({"unified"}, {"prefill", "decode"}):
        return
    if "unified" in names:
        others = " and ".join(n for n in plan.deployments if n != "unified")
        yield Problem(
            path=(DEPLOYMENTS, "unified"),
            text=f"runs both phases, so it cannot stand beside {others}",
            hint="delete unified, or everything but unified",
        )
    elif not names:
        yield Problem(
            path=(DEPLOYMENTS,),
            text="names no deployment",
            value={},
            hint="add unified, or prefill and decode",
        )
    else:
        given = next(iter(names))
        missing = "decode" if given == "prefill" else "prefill"
        yield Problem(
            path=(DEPLOYMENTS, missing),
            text=f"is missing: {given} alone cannot serve a request",
            hint=f"add {missing}, or call the one deployment unified",
        )


def _ranks(plan: Plan) -> Iterator[Problem]:
    cluster, needed = plan.cluster, total_ranks(plan)
    sums = " + ".join(f"{n} {d.instances} x {d.expert_parallel}" for n, d in plan.deployments.items())
    if cluster.ranks_per_node == "auto":
        if needed % cluster.nodes:
            fits = max(n for n in range(1, cluster.nodes) if needed % n == 0)
            yield Problem(
                path=("cluster", "nodes"),
                text=f"does not divide the {needed} ranks of the deployments ({sums})",
                value=cluster.nodes,
                hint=f"set cluster.nodes: {fits}",
            )
        return
    have = cluster.nodes * cluster.ranks_per_node
    if have == needed:
        return
    if needed % cluster.nodes == 0:
        hint = f"set cluster.ranks_per_node: {needed // cluster.nodes}"
    elif needed % cluster.ranks_per_node == 0:
        hint = f"set cluster.nodes: {needed // cluster.ranks_per_node}"
    else:
        hint = f"set cluster.nodes: 1 and cluster.ranks_per_node: {needed}"
    yield Problem(
        path=("cluster", "ranks_per_node"),
        text=f"gives {cluster.nodes} x {cluster.ranks_per_node} = {have} ranks,"
        f" the deployments need {needed} ({sums})",
        value=cluster.ranks_per_node,
        hint=hint,
    )


def _deployment(name: str, d: DeploymentSection) -> Iterator[Problem]:
    def at(*keys: str) -> Path:
        return (DEPLOYMENTS, name, *keys)

    s, kv, dispatch = d.scheduler, d.kv_cache, d.dispatch
    for key, value, reason in (
        ("chunk_tokens", s.chunk_tokens, "a step holds no more rows"),
        ("max_sequences", s.max_sequences, "every sequence that decodes has a row in each step"),
    ):
        if value > s.max_batch_tokens:
            yield Problem(
                path=at("scheduler", key),
                text=f"exceeds max_batch_tokens = {s.max_batch_tokens}: {reason}",
                value=value,
                hint=f"set {key}: {s.max_batch_tokens} or max_batch_tokens: {value}",
            )
    if dispatch.max_tokens != "auto" and dispatch.max_tokens > s.max_batch_tokens:
        yield Problem(
            path=at("dispatch", "max_tokens"),
            text=f"exceeds scheduler.max_batch_tokens = {s.max_batch_tokens}: a rank never sends more rows",
            value=dispatch.max_tokens,
            hint=f"set it to auto or at most {s.max_batch_tokens}",
        )
    if dispatch.backend == "local" and d.expert_parallel > 1:
        yield Problem(
            path=at("dispatch", "backend"),
            text=f"has no transport, but expert_parallel is {d.expert_parallel}",
            value="local",
            hint="set it to auto or torch",
        )
    if kv.block_tokens & (kv.block_tokens - 1):
        below = 1 << (kv.block_tokens.bit_length() - 1)
        yield Problem(
            path=at("kv_cache", "block_tokens"),
            text="is not a power of two",
            value=kv.block_tokens,
            hint=f"{below} or {2 * below} works",
        )
    capacity = kv.blocks * kv.block_tokens
    if capacity < s.chunk_tokens:
        yield Problem(
            path=at("kv_cache", "blocks"),
            text=f"holds {capacity} tokens ({kv.blocks} x {kv.block_tokens}), less than one prompt chunk"
            f" of scheduler.chunk_tokens = {s.chunk_tokens}",
            value=kv.blocks,
            hint=f"set blocks: {-(-s.chunk_tokens // kv.block_tokens)} or chunk_tokens: {capacity}",
        )


def _block_tokens(plan: Plan) -> Iterator[Problem]:
    prefill, decode = plan.deployments.get("prefill"), plan.deployments.get("decode")
    if prefill is None or decode is None:
        return
    ours, theirs = prefill.kv_cache.block_tokens, decode.kv_cache.block_tokens
    if ours != theirs:
        yield Problem(
            path=(DEPLOYMENTS, "decode", "kv_cache", "block_tokens"),
            text=f"differs from prefill's {ours}: decode pulls whole blocks of prefill's KV",
            value=theirs,
            hint=f"set both to {ours}",
        )


def _deterministic(plan: Plan) -> Iterator[Problem]:
    """Batch-invariant kernels exist for the CPU, and DeepEP adds up per rank, so placement would show."""
    for name, d in plan.deployments.items():
        if not d.deterministic:
            continue
        if plan.cluster.device != "cpu":
            yield Problem(
                path=(DEPLOYMENTS, name, "deterministic"),
                text=f"has no batch-invariant kernels for cluster.device: {plan.cluster.device}",
                value=True,
                hint="set it to false",
            )
        elif d.dispatch.backend == DEEPEP:
            yield Problem(
                path=(DEPLOYMENTS, name, "dispatch", "backend"),
                text="adds expert outputs up per rank, so results would depend on the placement",
                value=DEEPEP,
                hint="set it to auto, or deterministic: false",
            )


def _kernels(plan: Plan) -> Iterator[Problem]:
    """Libraries run on GPUs, and only the device's own kernels are batch-invariant."""
    for name, d in plan.deployments.items():
        for operation, chosen in d.kernels.model_dump().items():
            path = (DEPLOYMENTS, name, "kernels", operation)
            if chosen not in ("auto", "reference") and plan.cluster.device != "cuda":
                text = f"needs cluster.device: cuda, which is {plan.cluster.device}"
                yield Problem(path=path, text=text, value=chosen, hint="set it to auto or reference")
            elif chosen != "auto" and d.deterministic:
                text = "is not batch-invariant, which deterministic: true asks for"
                yield Problem(path=path, text=text, value=chosen, hint="set it to auto")
