"""The plan as it is written: frozen models of the YAML, one per section, with ranges and defaults.

Owns names, types, ranges and defaults of the keys, and nothing else: rules between keys are in
`validate`, "auto" is resolved in `resolve`. Types are strict: "4" is not 4 and true is not 1.
"""

from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, ConfigDict

Auto = Literal["auto"]
DeploymentName = Literal["prefill", "decode", "unified"]
DEPLOYMENT_NAMES: tuple[DeploymentName, ...] = get_args(DeploymentName)

ModelDtype = Literal["float32", "bfloat16", "float16"]
MODEL_DTYPES: tuple[ModelDtype, ...] = get_args(ModelDtype)
WireDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3"]

Ranks = Annotated[int, Ge(1), Le(65536)]
Tokens = Annotated[int, Ge(1), Le(1_048_576)]
Milliseconds = Annotated[float, Gt(0), Le(86_400_000)]
Text = Annotated[str, MinLen(1)]


class Section(BaseModel):
    """Base of all sections: immutable, strict, closed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """What is served.

    path   the checkpoint's folder; a relative one starts at the plan file's folder. `catalog:NAME` stands
           for a known model's sizes and published precision (`spec.catalog`): all but running it works
    dtype  of activations, and of weights that are not quantised
    """

    path: Text
    dtype: Auto | ModelDtype = "auto"


class ClusterSection(Section):
    """Where the ranks run. `hardware` names an entry of `spec.hardware`."""

    nodes: Ranks = 1
    ranks_per_node: Auto | Ranks = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    hardware: Text = "cpu-host"


class AttentionSection(Section):
    """`tensor_parallel`: ranks that share one batch of sequences."""

    tensor_parallel: Ranks = 1


class SchedulerSection(Section):
    """Per rank: rows of a step, sequences at once, prefill rows of a step, steps in flight.

    `chunk_budget`: `tpot` takes fewer prefill rows while somebody decodes, so that a step keeps to
    slo.tpot_ms by the measured cost of a row. `prefill_delay_steps`: steps for which prefill may wait,
    while others decode, until every rank of the instance has some. `attention_span`: tokens of context at
    which a prefill row takes twice the time of one without; the row at position p then counts as
    1 + p / attention_span of `chunk_tokens`. 0: all rows count alike.
    """

    max_batch_tokens: Tokens = 512
    max_sequences: Tokens = 32
    chunk_tokens: Tokens = 256
    chunk_budget: Literal["fixed", "tpot"] = "fixed"
    prefill_delay_steps: Annotated[int, Ge(0), Le(1000)] = 0
    attention_span: Annotated[int, Ge(0), Le(1_048_576)] = 0
    pipeline_depth: Auto | Annotated[int, Ge(0), Le(1)] = "auto"


class KVCacheSection(Section):
    """Per rank: `blocks` blocks of `block_tokens` tokens.

    `prefix_cache`: prompts that begin alike share the KV of what they have in common.
    """

    block_tokens: Annotated[int, Ge(1), Le(256)] = 16
    blocks: Annotated[int, Ge(1), Le(2**28 - 1)] = 512
    prefix_cache: bool = True
    dtype: Auto | WireDtype = "auto"


class DispatchSection(Section):
    """`max_tokens`: rows a rank sends in one dispatch round. `mode`: how rows travel; `per_step`: low-latency
    where every rank only decodes and one round carries its rows.
    """

    backend: Auto | Literal["local", "torch", "shm", "deepep"] = "auto"
    dtype: Auto | WireDtype = "auto"
    max_tokens: Auto | Tokens = "auto"
    mode: Auto | Literal["normal", "low_latency", "per_step"] = "auto"


class OverlapSection(Section):
    """`micro_batches`: halves in which a step's batch runs; `per_step`: as the cost model expects."""

    micro_batches: Auto | Literal["per_step"] | Annotated[int, Ge(1), Le(2)] = "auto"


class BalancingSection(Section):
    """Where experts sit: `initial` at the start, and live rebalancing from there, if `enabled`.

    initial          `linear`, or a file: a placement, or recorded loads to solve one for; a relative path
                     starts at the plan file's folder
    interval_tokens  rows of all ranks of an instance between decisions
    horizon_windows  intervals for which a better placement of a steady load is expected to pay
    min_gain         part by which a layer's peak has to fall for the layer to change
    bytes_per_step   that leave a rank in a step
    timeout_s        for one layer to be staged on every rank, before it is dropped
    """

    enabled: bool = False
    initial: Text = "linear"
    interval_tokens: Annotated[int, Ge(1), Le(2**40)] = 16384
    horizon_windows: Annotated[float, Gt(0), Le(1e6)] = 256.0
    min_gain: Annotated[float, Ge(0), Le(1)] = 0.01
    bytes_per_step: Annotated[int, Ge(1), Le(2**40)] = 16 << 20
    timeout_s: Annotated[float, Gt(0), Le(3600)] = 10.0


class KernelsSection(Section):
    """Which implementation runs an operation; `auto`: the device's own. Libraries are for GPUs."""

    experts: Auto | Literal["reference", "deepgemm"] = "auto"
    mla_decode: Auto | Literal["reference", "flash_mla"] = "auto"


class DeploymentSection(Section):
    """A set of ranks that runs one phase: `instances` copies of `expert_parallel` ranks."""

    instances: Ranks = 1
    expert_parallel: Ranks = 1
    redundant_experts: Annotated[int, Ge(0), Le(1_048_576)] = 0
    attention: AttentionSection = AttentionSection()
    scheduler: SchedulerSection = SchedulerSection()
    kv_cache: KVCacheSection = KVCacheSection()
    dispatch: DispatchSection = DispatchSection()
    overlap: OverlapSection = OverlapSection()
    balancing: BalancingSection = BalancingSection()
    deterministic: bool = False
    kernels: KernelsSection = KernelsSection()
    shared_experts: Literal["replicated", "slots"] = "replicated"


class ServerSection(Section):
    """Where clients connect, and what they may ask for.

    served_name     what clients call the model; empty: the name of the checkpoint's folder
    max_body_bytes  of a request
    max_choices     outputs that one request may ask for: prompts x n
    timeout_s       from a request's arrival to its last token, unless it names less
    grace_s         how long running requests may go on once the server is told to stop
    """

    host: Text = "127.0.0.1"
    port: Annotated[int, Ge(1024), Le(65535)] = 8000
    frontends: Annotated[int, Ge(1), Le(1024)] = 1
    served_name: str = ""
    max_body_bytes: Annotated[int, Ge(1024), Le(2**30)] = 4 << 20
    max_choices: Annotated[int, Ge(1), Le(1024)] = 128
    timeout_s: Annotated[float, Gt(0), Le(86_400)] = 600.0
    grace_s: Annotated[float, Ge(0), Le(86_400)] = 30.0
    log: Literal["plain", "json"] = "plain"


class SloSection(Section):
    """What goodput counts: time to first token, time per output token."""

    ttft_ms: Milliseconds = 2000.0
    tpot_ms: Milliseconds = 100.0


class Plan(Section):
    """A whole plan. `deployments` is in YAML order, which is the order of the ranks."""

    model: ModelSection
    cluster: ClusterSection = ClusterSection()
    deployments: dict[DeploymentName, DeploymentSection]
    server: ServerSection = ServerSection()
    slo: SloSection = SloSection()
