"""Room: whether an instance is possible, by the plan's own limits and memory budget, and how large its cache.

Owns the way from a choice to a plan's deployment, and what tensor parallelism and drafts change of its bytes:
plans of this version cannot say them. Knows no times.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from moe_runtime.plan.budget import MemoryBudget, memory_per_rank
from moe_runtime.plan.effective import EffectiveCluster, EffectiveDeployment
from moe_runtime.plan.resolve import effective_values
from moe_runtime.plan.schema import Plan
from moe_runtime.plan.validate import plan_limits
from moe_runtime.spec.bytes import attention_weight_bytes, draft_bytes, slot_bytes
from moe_runtime.spec.kv import INDEX_MASK
from moe_runtime.spec.model import GqaSpec
from moe_runtime.virtual.search.option import Choice
from moe_runtime.virtual.search.query import Query

BLOCK_TOKENS = 64
MOST_BLOCKS = INDEX_MASK
FREE = 0.06
"""Share of a device's memory that stays free: contexts of driver and libraries, graphs, fragments."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a possible choice takes. `deployment` is its plan's, without tensor parallelism."""

    cluster: EffectiveCluster
    deployment: EffectiveDeployment
    budget: MemoryBudget

    @property
    def blocks(self) -> int:
        return self.deployment.kv_cache.blocks


def room(query: Query, choice: Choice, kv_tokens: float) -> Room | str:
    """Room for a choice whose groups keep `kv_tokens` tokens in the cache, or what stands against it."""
    return _room(query, choice, max(1, math.ceil(kv_tokens / BLOCK_TOKENS)))


def most_blocks(query: Query, choice: Choice, blocks: int) -> int:
    """The most KV blocks that fit, at least the `blocks` that are known to."""
    low, high = blocks, min(2 * blocks, MOST_BLOCKS)
    while low < high and not isinstance(_room(query, choice, high), str):
        low, high = high, min(2 * high, MOST_BLOCKS)
    while high - low > 1:
        middle = (low + high) // 2
        fits = not isinstance(_room(query, choice, middle), str)
        low, high = (middle, high) if fits else (low, middle)
    return low


def _room(query: Query, choice: Choice, blocks: int) -> Room | str:
    plan = Plan.model_validate(
        {
            "model": {"path": query.name},
            "cluster": cluster_section(query, choice.ranks),
            "deployments": {"unified": deployment_section(query, choice, blocks)},
        }
    )
    effective = effective_values(plan, query.model)
    for problem in plan_limits(effective, query.model):
        return problem.text
    deployment = effective.deployments[0]
    budget = memory_per_rank(effective, deployment, query.model)
    budget = _with_slices(query, choice, budget)
    free = query.machine.hardware.memory_bytes * (1 - FREE) - budget.total
    if free < 0:
        name, size = max(budget.terms, key=lambda term: term[1])
        return f"memory: {budget.total / 2**30:.0f} GiB a rank, {name} {size / 2**30:.0f} GiB"
    return Room(effective.cluster, deployment, budget)


def cluster_section(query: Query, ranks: int) -> dict[str, Any]:
    """Of ranks that fill nodes, or share one."""
    per_node = min(ranks, query.ranks_per_node)
    return {
        "nodes": -(-ranks // per_node),
        "ranks_per_node": per_node,
        "device": "cuda",
        "hardware": query.hardware,
    }


def deployment_section(query: Query, choice: Choice, blocks: int) -> dict[str, Any]:
    """The deployment of a choice as a plan has it, tensor parallelism and drafts left out."""
    sequences = choice.sequences or max(1, math.ceil(choice.chunk / max(query.workload.computed, 1.0)) * 4)
    chunk = choice.chunk or min(choice.sequences, blocks * BLOCK_TOKENS)
    batch = max(choice.sequences + choice.chunk, chunk)
    dispatch: dict[str, Any] = {"backend": choice.backend}
    if choice.backend != "local":
        quantised = query.model.quantization is not None
        dispatch["dtype"] = "float8_e4m3" if quantised else "bfloat16"
        dispatch["max_tokens"] = min(choice.max_tokens, batch)
    if choice.backend == "deepep":
        # Low-latency rounds would cut a unified deployment's prompts into pieces of a few hundred rows.
        dispatch["mode"] = "low_latency" if choice.phase == "decode" else "normal"
    return {
        "expert_parallel": choice.ranks,
        "redundant_experts": choice.redundant,
        "scheduler": {
            "max_batch_tokens": batch,
            "max_sequences": min(sequences, batch),
            "chunk_tokens": chunk,
        },
        "kv_cache": {"block_tokens": BLOCK_TOKENS, "blocks": max(blocks, -(-chunk // BLOCK_TOKENS))},
        "dispatch": dispatch,
        "overlap": {"micro_batches": choice.micro_batches},
    }


def _with_slices(query: Query, choice: Choice, budget: MemoryBudget) -> MemoryBudget:
    """The budget with sliced weights and KV heads, and with draft layers where there are drafts."""
    model, dtype, group = query.model, query.model.dtype, choice.group
    if choice.queries > 1:
        shared, slot = draft_bytes(model, dtype)
        slots = -(-(model.moe.num_experts + choice.redundant) // choice.ranks)
        layers = (model.num_layers + model.mtp_layers) / model.num_layers
        budget = replace(
            budget,
            shared_weights=budget.shared_weights + shared,
            experts=budget.experts + slots * slot,
            kv_cache=round(budget.kv_cache * layers),
        )
    if group == 1:
        return budget
    heads = 1.0
    if isinstance(model.attention, GqaSpec):
        kv_heads = model.attention.num_kv_heads
        heads = max(1, kv_heads // group) / kv_heads
    if choice.whole:
        experts = model.moe.slot_experts * slot_bytes(model, dtype)
        budget = replace(budget, experts=-(-experts // group), redundant_experts=0, dispatch=0)
    sliced = budget.shared_weights if choice.whole else attention_weight_bytes(model, dtype)
    return replace(
        budget,
        shared_weights=budget.shared_weights - sliced + sliced // group,
        kv_cache=math.ceil(budget.kv_cache * heads),
    )
