"""The report of a run, RUN.json: frozen, typed and versioned objects, and nothing that computes.

Every field is explained with its unit in docs/report.md. Units are in the names where they can
be (`_ms`, `_seconds`, `_bytes`, `_per_second`). What could not be measured is null, never 0,
and `missing` then has its path and the reason.
"""

from typing import Any, Literal

import msgspec

from moe_runtime.report.schema_time import Attribution, Balancing, RankLoads, Simulation, Timeline

SCHEMA_VERSION = 2
OLDEST_VERSION = 1  # that is read: see files.py


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host that wrote the report, and the hardware the plan names."""

    hardware: str
    device: str
    cpu_model: str | None
    cores: int | None
    memory_bytes: int | None


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was served."""

    path: str
    family: str
    dtype: str
    hidden: int
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    vocab_size: int


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the command line asked for."""

    trace: str
    speed: float
    limit: int | None
    scale_lengths: float


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time over which rates are computed; seconds from the first scheduled arrival."""

    basis: Literal["arrivals", "whole_run"]
    start: float
    end: float
    seconds: float
    asked_seconds: float
    short: bool
    note: str


class Requests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts of the whole run, and how many of the requests arrived in the window."""

    count: int
    finished: int
    failed: int
    preemptions: int
    in_window: int


class Percentiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution; the unit is in the name of the field that holds it."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latencies of the finished requests that arrived in the window, in milliseconds."""

    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    end_to_end_ms: Percentiles | None
    send_lag_ms: Percentiles | None


class RequestRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output tokens per second as single requests saw them. `decode_only` leaves the TTFT out."""

    end_to_end_tokens_per_second: Percentiles | None
    decode_only_tokens_per_second: Percentiles | None


class Goodput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests that met both service-level objectives."""

    ttft_slo_ms: float
    tpot_slo_ms: float
    requests: int
    requests_per_second: float
    fraction: float | None


class WholeRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From the first scheduled arrival to the last token: drains included, so usually slower."""

    seconds: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_second: float | None
    prompt_tokens_per_second: float | None


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens per second in the window, with each denominator."""

    total: float
    per_rank: float
    per_node_of_role: float
    per_node_of_all: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens computed, prompt tokens taken from a cache, and tokens generated: never added up."""

    new_prefill: Rate
    cached_prefill: Rate
    output: Rate


class System(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All deployments together; here the nodes of the role are the nodes of all."""

    nodes: float
    ranks: int
    throughput: Throughput


class KvUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Use of the KV blocks of a rank."""

    blocks_per_rank: int
    peak_fraction: float | None
    mean_fraction: float | None


class LayerBalance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Balancedness (mean rank load / max rank load) of one MoE layer over its steps with load."""

    layer: int
    steps: int
    mean: float | None
    p5: float | None
    of_sum: float | None


class Exchange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ranks sent each other in the window; dispatched rows as they travel."""

    dispatched_rows: int | None
    dispatched_bytes: int | None
    combined_bytes: int | None
    dispatched_rows_per_token: float | None
    dispatched_bytes_per_token: float | None
    combined_bytes_per_token: float | None


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exclusive host wall time of one phase: mean per rank and step, and its share of the step."""

    phase: str
    seconds_per_step: float
    share: float


class OverlapUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many steps ran as two micro-batches, and steps by reason (OVERLAP_REASONS of the records)."""

    overlapped_fraction: float | None
    reasons: dict[str, int]


class RankUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank did in the window."""

    instance: str
    rank: int
    steps: int
    new_prefill_tokens_per_second: float
    cached_prefill_tokens_per_second: float
    decode_rows_per_second: float
    mean_decode_rows: float | None
    peak_kv_fraction: float | None
    active_fraction: float


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One role: prefill, decode or unified.

    dispatch_modes   steps by how their rows travelled
    kernels          operation -> module that ran it
    """

    name: str
    nodes: float
    ranks: int
    expert_parallel: int
    instances: tuple[str, ...]
    redundant_experts: int
    dispatch_backend: str
    dispatch_modes: dict[str, int]
    kernels: dict[str, str]
    throughput: Throughput
    steps: int
    mean_step_ms: float | None
    step_fill: float | None
    recomputed_tokens: int
    preemptions: int
    kv: KvUse
    balancedness: tuple[LayerBalance, ...]
    exchange: Exchange
    phases: tuple[PhaseTime, ...]
    hidden: float | None
    overlap: OverlapUse
    per_rank: tuple[RankUse, ...]
    attribution: Attribution | None
    timeline: Timeline | None
    rank_loads: RankLoads | None
    balancing: Balancing | None = None


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request; seconds from the first scheduled arrival. Null: that did not happen."""

    index: int
    arrival: float
    sent: float | None
    first_token: float | None
    last_token: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    error: str | None


class Missing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why the field at `path` is null. A deployment is named in the path, list items by their index."""

    path: str
    reason: str


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """RUN.json."""

    schema_version: int
    kind: Literal["bench"]
    created: str
    version: str
    commit: str | None
    simulated: bool
    simulation: Simulation | None
    machine: Machine
    plan_digest: str
    plan: dict[str, Any]
    model: ModelSummary
    options: Options
    window: Window
    requests: Requests
    latency: Latency
    request_rates: RequestRates
    goodput: Goodput
    whole_run: WholeRun
    system: System
    deployments: tuple[Deployment, ...]
    warnings: tuple[str, ...]
    missing: tuple[Missing, ...]
    request_log: tuple[RequestRow, ...]


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of RUN.json."""
    return msgspec.json.schema(Report)
