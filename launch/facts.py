"""What a report says of a run before anything is measured: from the plan, the model and the command line."""

from collections.abc import Mapping
from datetime import UTC, datetime

import moe_runtime
from moe_runtime.launch.preflight import Preflight
from moe_runtime.plan.validate import plan_warnings
from moe_runtime.report.facts import DeploymentFacts, RunFacts
from moe_runtime.report.machine import read_commit, summarize_model
from moe_runtime.report.schema import Machine, Options
from moe_runtime.report.schema_time import Simulation


def run_facts(
    flight: Preflight,
    options: Options,
    machine: Machine,
    *,
    kernels: Mapping[str, Mapping[str, str]],
    warmup_end: float | None = None,
    notes: tuple[str, ...] = (),
    simulation: Simulation | None = None,
) -> RunFacts:
    """`kernels` by deployment, none where nothing ran; the plan's own warnings follow `notes`."""
    plan = flight.effective
    return RunFacts(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=moe_runtime.__version__,
        commit=read_commit(),
        machine=machine,
        plan=plan.to_json(),
        plan_digest=plan.digest,
        model=summarize_model(flight.model, path=plan.model.path, dtype=plan.model.dtype),
        options=options,
        ranks_per_node=plan.cluster.ranks_per_node,
        moe_layers=flight.model.moe_layers,
        deployments=tuple(
            DeploymentFacts(
                name=d.name,
                instances=tuple(i.name for i in plan.instances if i.deployment == d.name),
                expert_parallel=d.expert_parallel,
                redundant_experts=d.redundant_experts,
                dispatch_backend=d.dispatch.backend,
                kv_blocks=d.kv_cache.blocks,
                kernels=kernels.get(d.name, {}),
            )
            for d in plan.deployments
        ),
        slo=(plan.slo.ttft_ms, plan.slo.tpot_ms),
        warmup_end=warmup_end,
        notes=(*notes, *plan_warnings(plan, flight.model)),
        simulation=simulation,
    )
