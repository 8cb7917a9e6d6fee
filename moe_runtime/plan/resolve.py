"""Plan + ModelSpec -> EffectivePlan: a pure function in which every "auto" gets its value.

Owns the rules of "auto" and the assignment of ranks. Refuses nothing: `validate` does.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Literal, TypeVar

from moe_runtime.plan import deepep
from moe_runtime.plan.effective import (
    EffectiveAttention,
    EffectiveBalancing,
    EffectiveCluster,
    EffectiveDeployment,
    EffectiveDispatch,
    EffectiveKernels,
    EffectiveKVCache,
    EffectiveModel,
    EffectiveOverlap,
    EffectivePlan,
    EffectiveScheduler,
    EffectiveServer,
    EffectiveSlo,
    InstancePlan,
    MicroBatches,
    ModeChoice,
)
from moe_runtime.plan.keys import DEPLOYMENTS
from moe_runtime.plan.plan_rules import total_ranks
from moe_runtime.plan.schema import DeploymentName, DeploymentSection, Plan
from moe_runtime.spec.bytes import slots_per_rank, surplus_slots
from moe_runtime.spec.kv import kv_spec
from moe_runtime.spec.model import ModelSpec, serve_shared_in_slots

T = TypeVar("T", bound=int | str)


def resolve(plan: Plan, model: ModelSpec) -> EffectivePlan:
    """The effective plan of a plan that `load_plan` accepts, for one model.

    The digest depends on every effective value and on the ModelSpec; not on the model's path,
    nor on whether a value was given or derived.
    """
    effective = effective_values(plan, model)
    return replace(effective, digest=_digest(effective, model))


def effective_values(plan: Plan, model: ModelSpec) -> EffectivePlan:
    """The effective plan without its digest, which takes longer than the rest: for who looks at thousands."""
    settle = _Settler()
    instances = tuple(_instances(plan))
    cluster = plan.cluster
    dtype = settle("model.dtype", plan.model.dtype, model.dtype, "the model's own")
    ranks_per_node = settle(
        "cluster.ranks_per_node",
        cluster.ranks_per_node,
        total_ranks(plan) // cluster.nodes,
        "all ranks / cluster.nodes",
    )
    return EffectivePlan(
        model=EffectiveModel(path=plan.model.path, dtype=dtype),
        cluster=EffectiveCluster(
            nodes=cluster.nodes,
            ranks_per_node=ranks_per_node,
            device=cluster.device,
            hardware=cluster.hardware,
        ),
        deployments=tuple(
            _deployment(
                name,
                d,
                model,
                dtype,
                cluster.device,
                ranks_per_node,
                settle,
                one_node=all(_on_one_node(i, ranks_per_node) for i in instances if i.deployment == name),
            )
            for name, d in plan.deployments.items()
        ),
        instances=instances,
        server=EffectiveServer(**plan.server.model_dump()),
        slo=EffectiveSlo(**plan.slo.model_dump()),
        derived=tuple(settle.derived.items()),
        digest="",
    )


class _Settler:
    """Replaces "auto" and remembers why each value is what it is."""

    def __init__(self) -> None:
        self.derived: dict[str, str] = {}

    def __call__(self, key: str, given: T | Literal["auto"], value: T, reason: str) -> T:
        if given != "auto":
            return given
        self.derived[key] = reason
        return value


def _deployment(
    name: DeploymentName,
    d: DeploymentSection,
    model: ModelSpec,
    dtype: str,
    device: str,
    ranks_per_node: int,
    settle: _Settler,
    *,
    one_node: bool,
) -> EffectiveDeployment:
    at = f"{DEPLOYMENTS}.{name}"
    depth = (0, "nothing overlaps on CPU") if device == "cpu" else (1, "host and device overlap")
    own = ("torch", "a CPU's own") if device == "cpu" else ("triton", "a GPU's own")
    alone = d.expert_parallel == 1
    overlap: MicroBatches = 1 if alone else "per_step"
    why = "one rank: no transport to hide" if alone else "decided by measured times"
    kv_dtype = settle(f"{at}.kv_cache.dtype", d.kv_cache.dtype, dtype, "model.dtype")
    num_experts = _slot_experts(d, model)
    return EffectiveDeployment(
        name=name,
        instances=d.instances,
        expert_parallel=d.expert_parallel,
        redundant_experts=d.redundant_experts,
        attention=EffectiveAttention(tensor_parallel=d.attention.tensor_parallel),
        scheduler=EffectiveScheduler(
            max_batch_tokens=d.scheduler.max_batch_tokens,
            max_sequences=d.scheduler.max_sequences,
            chunk_tokens=d.scheduler.chunk_tokens,
            chunk_budget=d.scheduler.chunk_budget,
            prefill_delay_steps=d.scheduler.prefill_delay_steps,
            attention_span=d.scheduler.attention_span,
            pipeline_depth=settle(f"{at}.scheduler.pipeline_depth", d.scheduler.pipeline_depth, *depth),
        ),
        kv_cache=EffectiveKVCache(
            block_tokens=d.kv_cache.block_tokens,
            blocks=d.kv_cache.blocks,
            prefix_cache=d.kv_cache.prefix_cache,
            dtype=kv_dtype,
        ),
        dispatch=_dispatch(name, d, dtype, _backend(d, device, one_node=one_node), settle),
        overlap=EffectiveOverlap(
            micro_batches=settle(f"{at}.overlap.micro_batches", d.overlap.micro_batches, overlap, why)
        ),
        balancing=EffectiveBalancing(**d.balancing.model_dump()),
        deterministic=d.deterministic,
        kernels=EffectiveKernels(
            experts=settle(f"{at}.kernels.experts", d.kernels.experts, *own),
            mla_decode=settle(f"{at}.kernels.mla_decode", d.kernels.mla_decode, *own),
        ),
        shared_experts=d.shared_experts,
        slots_per_rank=slots_per_rank(num_experts, d.redundant_experts, d.expert_parallel),
        surplus_slots=surplus_slots(num_experts, d.redundant_experts, d.expert_parallel),
        kv=kv_spec(model, block_tokens=d.kv_cache.block_tokens, dtype=kv_dtype),
        nodes=d.instances * d.expert_parallel / ranks_per_node,
    )


def _dispatch(
    name: DeploymentName, d: DeploymentSection, dtype: str, auto_backend: tuple[str, str], settle: _Settler
) -> EffectiveDispatch:
    at, given = f"{DEPLOYMENTS}.{name}.dispatch", d.dispatch
    backend = settle(f"{at}.backend", given.backend, *auto_backend)
    auto_mode: tuple[ModeChoice, str] = "normal", "no graphs need static shapes"
    if backend == deepep.BACKEND:
        auto_mode = deepep.MODE_OF_ROLE[name], f"DeepEP's for {name}"
    mode = settle(f"{at}.mode", given.mode, *auto_mode)
    tokens = d.scheduler.max_batch_tokens, "max_batch_tokens"
    if backend == deepep.BACKEND:
        tokens = deepep.auto_max_tokens(
            mode,
            ranks=d.expert_parallel,
            max_sequences=d.scheduler.max_sequences,
            max_batch_tokens=d.scheduler.max_batch_tokens,
        )
    return EffectiveDispatch(
        backend=backend,
        dtype=settle(f"{at}.dtype", given.dtype, dtype, "model.dtype"),
        max_tokens=settle(f"{at}.max_tokens", given.max_tokens, *tokens),
        mode=mode,
    )


def _slot_experts(d: DeploymentSection, model: ModelSpec) -> int:
    """Experts that sit in slots; shared ones that are no whole experts (which `validate` refuses) do not."""
    moe = model.moe
    if d.shared_experts == "replicated" or moe.shared_intermediate % moe.intermediate:
        return moe.num_experts
    return serve_shared_in_slots(model).moe.slot_experts


def _backend(d: DeploymentSection, device: str, *, one_node: bool) -> tuple[str, str]:
    """The transport of "auto", and why."""
    if d.expert_parallel == 1:
        return "local", "one rank: no transport"
    if device == "cpu" and one_node:
        return "shm", "several ranks of one host"
    return "torch", "several ranks"


def _on_one_node(instance: InstancePlan, ranks_per_node: int) -> bool:
    return instance.ranks.start // ranks_per_node == (instance.ranks.stop - 1) // ranks_per_node


def _instances(plan: Plan) -> Iterator[InstancePlan]:
    """Consecutive ranks, deployments in YAML order, the instances of each one after the other."""
    first = 0
    for name, d in plan.deployments.items():
        for i in range(d.instances):
            ranks = range(first, first + d.expert_parallel)
            yield InstancePlan(name=f"{name}-{i}", deployment=name, ranks=ranks)
            first = ranks.stop


def _digest(effective: EffectivePlan, model: ModelSpec) -> str:
    values = effective.to_json()
    del values["digest"], values["derived"], values["model"]["path"]
    canonical = json.dumps([values, asdict(model)], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()
