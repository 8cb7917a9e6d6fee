"""The effective plan: what runs. Frozen, no "auto" left; sections are named as in the YAML.

Owns the objects only; `resolve` makes them, `validate` judges them. All of them are plain data
that can cross a process boundary.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from moe_runtime.plan.schema import DeploymentName
from moe_runtime.spec.kv import KVSpec
from moe_runtime.spec.limits import DISPATCH_MODES, DispatchMode
from moe_runtime.spec.model import ModelSpec, serve_shared_in_slots

MicroBatches = Literal["per_step"] | int
ModeChoice = DispatchMode | Literal["per_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveModel:
    """`path` is absolute, or `catalog:NAME`; `dtype` is that of activations and of weights that are not
    quantised.
    """

    path: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveCluster:
    nodes: int
    ranks_per_node: int
    device: str
    hardware: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveAttention:
    tensor_parallel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveScheduler:
    """Per rank. `pipeline_depth`: steps launched before the previous one is committed."""

    max_batch_tokens: int
    max_sequences: int
    chunk_tokens: int
    chunk_budget: Literal["fixed", "tpot"]
    prefill_delay_steps: int
    attention_span: int
    pipeline_depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveKVCache:
    """Per rank. `blocks` counts the primary group of the KVSpec."""

    block_tokens: int
    blocks: int
    prefix_cache: bool
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveDispatch:
    backend: str
    dtype: str
    max_tokens: int
    mode: ModeChoice

    @property
    def modes(self) -> tuple[DispatchMode, ...]:
        """What a step may run in."""
        return DISPATCH_MODES if self.mode == "per_step" else (self.mode,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveOverlap:
    micro_batches: MicroBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveBalancing:
    """`initial` is `linear` or an absolute path."""

    enabled: bool
    initial: str
    interval_tokens: int
    horizon_windows: float
    min_gain: float
    bytes_per_step: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveKernels:
    """`torch` and `triton` are the device's own."""

    experts: str
    mla_decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveDeployment:
    """One deployment.

    slots_per_rank  slots of every rank, per MoE layer
    surplus_slots   slots of one instance that stay empty, per MoE layer
    kv              what a token leaves in the cache
    nodes           ranks of all instances / ranks_per_node; may be fractional
    """

    name: DeploymentName
    instances: int
    expert_parallel: int
    redundant_experts: int
    attention: EffectiveAttention
    scheduler: EffectiveScheduler
    kv_cache: EffectiveKVCache
    dispatch: EffectiveDispatch
    overlap: EffectiveOverlap
    balancing: EffectiveBalancing
    deterministic: bool
    kernels: EffectiveKernels
    shared_experts: str
    slots_per_rank: int
    surplus_slots: int
    kv: KVSpec
    nodes: float

    @property
    def ranks(self) -> int:
        """Ranks of all instances."""
        return self.instances * self.expert_parallel

    @property
    def num_slots(self) -> int:
        """S: slots of one instance, per MoE layer."""
        return self.expert_parallel * self.slots_per_rank

    def served(self, model: ModelSpec) -> ModelSpec:
        """The model as this deployment holds it. ValueError as `serve_shared_in_slots`."""
        return serve_shared_in_slots(model) if self.shared_experts == "slots" else model


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePlan:
    """One EP group: `ranks` are its global ranks, consecutive."""

    name: str
    deployment: DeploymentName
    ranks: range


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveServer:
    host: str
    port: int
    frontends: int
    served_name: str
    max_body_bytes: int
    max_choices: int
    timeout_s: float
    grace_s: float
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSlo:
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectivePlan:
    """Everything that runs.

    deployments  in YAML order
    instances    in rank order: all of the first deployment, then all of the next
    derived      (dotted key, reason) of every value that was "auto"
    digest       16 hex digits over all of it and the ModelSpec, but not over where the model lies
    """

    model: EffectiveModel
    cluster: EffectiveCluster
    deployments: tuple[EffectiveDeployment, ...]
    instances: tuple[InstancePlan, ...]
    server: EffectiveServer
    slo: EffectiveSlo
    derived: tuple[tuple[str, str], ...]
    digest: str

    def deployment(self, name: str) -> EffectiveDeployment:
        """KeyError for a deployment the plan does not have."""
        return self.by_name[name]

    @property
    def by_name(self) -> Mapping[str, EffectiveDeployment]:
        return MappingProxyType({d.name: d for d in self.deployments})

    @property
    def num_ranks(self) -> int:
        return self.cluster.ranks

    def instance_of(self, rank: int) -> InstancePlan:
        """The instance a global rank belongs to. IndexError beyond the last rank."""
        for instance in self.instances:
            if rank in instance.ranks:
                return instance
        raise IndexError(f"rank {rank} of {self.num_ranks}")

    def nodes_of_an_instance(self, deployment: str) -> int:
        """The most nodes over which one instance of a deployment is spread."""
        found = [i.ranks for i in self.instances if i.deployment == deployment]
        return max(self.node_of(r.stop - 1) - self.node_of(r.start) + 1 for r in found)

    def node_of(self, rank: int) -> int:
        return rank // self.cluster.ranks_per_node

    def to_json(self) -> dict[str, Any]:
        """JSON types only, shaped like the YAML, with the derived numbers and the rank ranges."""
        return {
            "digest": self.digest,
            "model": asdict(self.model),
            "cluster": asdict(self.cluster),
            "deployments": {d.name: _deployment_json(d) for d in self.deployments},
            "instances": [
                {"name": i.name, "deployment": i.deployment, "ranks": list(i.ranks)} for i in self.instances
            ],
            "server": asdict(self.server),
            "slo": asdict(self.slo),
            "derived": dict(self.derived),
        }


def _deployment_json(deployment: EffectiveDeployment) -> dict[str, Any]:
    values = asdict(deployment)
    del values["name"], values["kv"]
    values["kv_bytes_per_token"] = deployment.kv.token_bytes
    return values
