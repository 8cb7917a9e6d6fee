"""Bytes per rank of a deployment, term by term, from the formulas of `spec.bytes`.

Owns which number goes into which formula. All ranks of a deployment are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.plan.deepep import BACKEND as DEEPEP
from moe_runtime.plan.deepep import registered_bytes
from moe_runtime.plan.effective import EffectiveDeployment, EffectivePlan
from moe_runtime.spec.bytes import (
    all_to_all_dispatch_bytes,
    local_dispatch_bytes,
    masked_rows_bytes,
    replicated_weight_bytes,
    shared_memory_dispatch_bytes,
    slot_bytes,
    slots_per_rank,
    wire_row_bytes,
    workspace_bytes,
)
from moe_runtime.spec.model import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of one rank.

    shared_weights     what every rank holds: attention, dense and shared MLPs, routers, embeddings
    experts            the slots this rank would have without redundancy
    redundant_experts  the slots redundancy adds (a surplus slot included)
    dispatch           rows in flight of one round, at their worst
    kv_cache           the whole pool
    staging            area for experts on the move
    workspace          activations of a step, an estimate
    notes              what a reader of the numbers has to know
    """

    deployment: str
    shared_weights: int
    experts: int
    redundant_experts: int
    dispatch: int
    kv_cache: int
    staging: int
    workspace: int
    notes: tuple[str, ...] = ()

    @property
    def terms(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of every term, in the order they are shown."""
        return (
            ("shared weights", self.shared_weights),
            ("experts", self.experts),
            ("redundant experts", self.redundant_experts),
            ("dispatch buffers", self.dispatch),
            ("KV cache", self.kv_cache),
            ("staging", self.staging),
            ("workspace", self.workspace),
        )

    @property
    def weights(self) -> int:
        """All that is read from the checkpoint."""
        return self.shared_weights + self.experts + self.redundant_experts

    @property
    def total(self) -> int:
        return sum(num_bytes for _, num_bytes in self.terms)


def memory_per_rank(
    effective: EffectivePlan, deployment: EffectiveDeployment, model: ModelSpec
) -> MemoryBudget:
    """The budget of one rank of a deployment. KV, weights and slots are exact."""
    model = deployment.served(model)
    dtype, kv = effective.model.dtype, deployment.kv_cache
    own_slots = slots_per_rank(model.moe.slot_experts, 0, deployment.expert_parallel)
    slot = slot_bytes(model, dtype)
    context = min(kv.blocks * kv.block_tokens, model.max_positions)
    return MemoryBudget(
        deployment=deployment.name,
        shared_weights=replicated_weight_bytes(model, dtype),
        experts=own_slots * slot,
        redundant_experts=(deployment.slots_per_rank - own_slots) * slot,
        dispatch=_dispatch_bytes(deployment, model, dtype),
        kv_cache=sum(group.block_bytes for group in deployment.kv.groups) * kv.blocks,
        staging=staging_bytes(deployment, model, dtype),
        workspace=workspace_bytes(
            model,
            dtype=dtype,
            batch_tokens=deployment.scheduler.max_batch_tokens,
            sequences=deployment.scheduler.max_sequences,
            context_tokens=context,
        ),
        notes=(
            "staging holds a layer's slots where experts move, and is 0 where they do not",
            "dispatch buffers are the worst case of one round; workspace is an estimate",
        ),
    )


def memory_budgets(effective: EffectivePlan, model: ModelSpec) -> tuple[MemoryBudget, ...]:
    """One budget per deployment, in plan order."""
    return tuple(memory_per_rank(effective, d, model) for d in effective.deployments)


def staging_bytes(deployment: EffectiveDeployment, model: ModelSpec, dtype: str) -> int:
    """A place for each of a rank's slots of one layer, if experts move; without alignment of its places."""
    if not deployment.balancing.enabled:
        return 0
    return deployment.slots_per_rank * slot_bytes(model, dtype) // model.num_moe_layers


def largest_term(budgets: Sequence[MemoryBudget], ranks: Sequence[int]) -> tuple[int, str]:
    """(index of the budget, name) of the term that takes most over all its ranks."""
    sizes = {
        (i, name): num_bytes * n
        for i, (budget, n) in enumerate(zip(budgets, ranks, strict=True))
        for name, num_bytes in budget.terms
    }
    return max(sizes, key=lambda key: sizes[key])


def _dispatch_bytes(deployment: EffectiveDeployment, model: ModelSpec, dtype: str) -> int:
    """DeepEP has a buffer per mode; other backends spread low-latency rows that they have received."""
    ranks, slots, dispatch = deployment.expert_parallel, deployment.slots_per_rank, deployment.dispatch
    if dispatch.backend == DEEPEP:
        buffers = registered_bytes(dispatch, hidden=model.hidden, slots=deployment.num_slots, ranks=ranks)
        return sum(buffers.values())
    tokens, top_k = dispatch.max_tokens, model.moe.slots_per_token
    row, output_row = wire_row_bytes(model.hidden, dispatch.dtype), wire_row_bytes(model.hidden, dtype)
    masked = 0
    if "low_latency" in dispatch.modes:
        masked = masked_rows_bytes(
            max_tokens=tokens, ranks=ranks, local_slots=slots, dispatch_row=row, combine_row=output_row
        )
    if dispatch.backend == "local":
        return masked + local_dispatch_bytes(
            max_tokens=tokens, top_k=top_k, hidden=model.hidden, dtype_bytes=DTYPE_BYTES[dtype]
        )
    formula = shared_memory_dispatch_bytes if dispatch.backend == "shm" else all_to_all_dispatch_bytes
    return masked + formula(
        max_tokens=tokens,
        top_k=top_k,
        ranks=ranks,
        local_slots=slots,
        dispatch_row=row,
        combine_row=output_row,
    )
